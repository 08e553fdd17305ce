"""Every table of this app in Django's admin: states read-only, acts through the services, secrets not shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from gpus_app.admin import HostAdmin
from gpus_app.models import Host
from models_app.errors import SardeenzError
from models_app.models import (
    ApiKey,
    AuditEntry,
    IdempotencyRecord,
    Instance,
    InstanceEvent,
    LaunchAttempt,
    MemoryPolicy,
    MemoryProfile,
    Model,
    ModelAlias,
    Operation,
    Preset,
    RouteTarget,
    UsageRecord,
    UsageSender,
    WeightedRoute,
)
from models_app.services.capture import capture_stop
from models_app.services.keys import api_key_revoke
from models_app.services.lifecycle.launch import instance_restart, model_launch
from models_app.services.lifecycle.sleep import instance_sleep, instance_wake
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory.kvcache import kvcache_trim
from models_app.services.models import model_delete
from models_app.services.plans.host_drain import host_drain
from models_app.services.plans.operations import operation_cancel
from models_app.services.routes import route_delete

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
    InlineBase = admin.TabularInline[Any, Any]
else:  # generic for the type checker only
    Base = admin.ModelAdmin
    InlineBase = admin.TabularInline


def each(self: Base, request: HttpRequest, rows: QuerySet[Any], work: Callable[[Any, str], object]) -> None:
    """Run a service on every chosen row; a refusal becomes a message and the others go on."""
    actor = request.user.get_username()
    done = 0
    for row in rows:
        try:
            work(row, actor)
            done += 1
        except SardeenzError as exc:
            self.message_user(request, f"{row}: {exc.message}", messages.ERROR)
    if done:
        self.message_user(request, f"Asked for {done}.", messages.SUCCESS)


class ReadOnlyAdmin(Base):
    """Rows that only the services and workers write."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ReadOnlyInline(InlineBase):
    """Lines of another table, shown beside their owner."""

    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AliasInline(ReadOnlyInline):
    model = ModelAlias


admin.site.unregister(Host)


@admin.register(Host)
class DrainableHostAdmin(HostAdmin):
    """With the act that knows of instances."""

    actions = (*HostAdmin.actions, "drain")

    @admin.action(description="Drain: what runs there moves elsewhere")
    def drain(self, request: HttpRequest, queryset: QuerySet[Host]) -> None:
        each(self, request, queryset, lambda host, actor: host_drain(host, actor=actor))


@admin.register(Model)
class ModelAdmin(ReadOnlyAdmin):
    """Added and changed on the Models pages, where every value is judged first."""

    list_display = ("served_model_name", "source", "model", "replicas", "deployed", "spec_revision", "updated_at")
    list_filter = ("source", "deployed", "kvcached", "on_demand", "pinned")
    search_fields = ("served_model_name", "model", "aliases__name")
    inlines = (AliasInline,)
    actions = ("launch", "stop", "delete_models")

    @admin.action(description="Launch")
    def launch(self, request: HttpRequest, queryset: QuerySet[Model]) -> None:
        each(self, request, queryset, lambda row, actor: model_launch(row, actor=actor))

    @admin.action(description="Stop every replica")
    def stop(self, request: HttpRequest, queryset: QuerySet[Model]) -> None:
        live = Instance.objects.live().filter(model__in=queryset).select_related("model", "host")
        each(self, request, live, lambda row, actor: instance_stop(row, actor=actor))

    @admin.action(description="Delete (refused while one runs)")
    def delete_models(self, request: HttpRequest, queryset: QuerySet[Model]) -> None:
        each(self, request, queryset, lambda row, actor: model_delete(row, actor=actor))


@admin.register(ModelAlias)
class ModelAliasAdmin(ReadOnlyAdmin):
    list_display = ("name", "model")
    list_select_related = ("model",)
    search_fields = ("name",)


class TargetInline(ReadOnlyInline):
    model = RouteTarget


@admin.register(RouteTarget)
class RouteTargetAdmin(ReadOnlyAdmin):
    list_display = ("route", "model", "weight")
    list_select_related = ("route", "model")
    search_fields = ("route__name", "model__served_model_name")


@admin.register(WeightedRoute)
class WeightedRouteAdmin(ReadOnlyAdmin):
    """Made and changed on the Routes page, where names and weights are judged first."""

    list_display = ("name", "created_by", "updated_at")
    search_fields = ("name", "targets__model__served_model_name")
    inlines = (TargetInline,)
    actions = ("delete_routes",)

    @admin.action(description="Delete (its models stay)")
    def delete_routes(self, request: HttpRequest, queryset: QuerySet[WeightedRoute]) -> None:
        each(self, request, queryset, lambda row, actor: route_delete(row, actor=actor))


@admin.register(MemoryPolicy)
class MemoryPolicyAdmin(ReadOnlyAdmin):
    list_display = ("model", "guarantee_bytes", "maximum_bytes", "priority", "idle_shrink_after_s", "reclaim")
    list_select_related = ("model",)


@admin.register(MemoryProfile)
class MemoryProfileAdmin(ReadOnlyAdmin):
    list_display = ("model", "gpu_name", "baseline_bytes", "weights_bytes", "load_s", "runs", "updated_at")
    search_fields = ("model", "gpu_name")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.is_superuser)  # a measurement that went wrong is made again at the next start


@admin.register(Instance)
class InstanceAdmin(ReadOnlyAdmin):
    list_display = (
        "pk",
        "model",
        "replica_index",
        "state",
        "desired_state",
        "host",
        "port",
        "limit_status",
        "health",
        "state_since",
    )
    list_filter = ("state", "desired_state", "limit_status", "health", "host")
    list_select_related = ("model", "host")
    search_fields = ("model__served_model_name", "reason", "ipc_name")
    exclude = ("engine_token",)
    actions = ("stop", "restart", "sleep", "wake", "trim")

    @admin.action(description="Stop")
    def stop(self, request: HttpRequest, queryset: QuerySet[Instance]) -> None:
        each(self, request, queryset, lambda row, actor: instance_stop(row, actor=actor))

    @admin.action(description="Restart with the saved options")
    def restart(self, request: HttpRequest, queryset: QuerySet[Instance]) -> None:
        each(self, request, queryset, lambda row, actor: instance_restart(row, actor=actor))

    @admin.action(description="Put to sleep")
    def sleep(self, request: HttpRequest, queryset: QuerySet[Instance]) -> None:
        each(self, request, queryset, lambda row, actor: instance_sleep(row, actor=actor))

    @admin.action(description="Wake")
    def wake(self, request: HttpRequest, queryset: QuerySet[Instance]) -> None:
        each(self, request, queryset, lambda row, actor: instance_wake(row, actor=actor))

    @admin.action(description="Trim idle KV memory")
    def trim(self, request: HttpRequest, queryset: QuerySet[Instance]) -> None:
        each(self, request, queryset, lambda row, actor: kvcache_trim(row, actor=actor, wait_s=2.0))


@admin.register(LaunchAttempt)
class LaunchAttemptAdmin(ReadOnlyAdmin):
    list_display = ("instance", "number", "host", "started_at", "ready_at", "ended_at", "exit_code", "signal", "cause")
    list_select_related = ("instance__model", "host")
    list_filter = ("host", "cause_code")
    search_fields = ("instance__model__served_model_name", "cause")


@admin.register(InstanceEvent)
class InstanceEventAdmin(ReadOnlyAdmin):
    list_display = ("at", "instance", "kind", "from_state", "to_state", "reason", "actor")
    list_select_related = ("instance__model",)
    list_filter = ("kind", "to_state")
    search_fields = ("reason", "actor", "instance__model__served_model_name")
    show_full_result_count = False


@admin.register(Operation)
class OperationAdmin(ReadOnlyAdmin):
    list_display = ("title", "kind", "state", "phase", "progress", "created_by", "created_at", "ended_at")
    list_filter = ("state", "kind")
    search_fields = ("title", "message", "created_by")
    actions = ("cancel",)

    @admin.action(description="Cancel")
    def cancel(self, request: HttpRequest, queryset: QuerySet[Operation]) -> None:
        each(self, request, queryset, lambda row, actor: operation_cancel(row, actor=actor))


@admin.register(ApiKey)
class ApiKeyAdmin(ReadOnlyAdmin):
    """Made and changed on the Keys page, which shows a secret once."""

    list_display = (
        "name", "prefix", "role", "priority", "expires_at", "revoked_at", "previous_until", "capture_until",
        "last_used_at", "created_by",
    )  # fmt: skip
    list_filter = ("role", "may_capture")
    search_fields = ("name", "prefix")
    exclude = ("digest", "previous_digest")
    actions = ("rotate", "end_capture", "revoke")

    @admin.action(description="Rotate (new secret, the old one goes on for a while)")
    def rotate(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> HttpResponse | None:
        """On the page that shows the secret once; a message here would be kept in a cookie or session."""
        keys = list(queryset[:2])
        if len(keys) == 1:
            return HttpResponseRedirect(f"/keys/{keys[0].pk}/rotate/")
        self.message_user(request, "Choose one key: each gets a secret of its own.", messages.ERROR)
        return None

    @admin.action(description="Switch capture off and delete what was captured")
    def end_capture(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        each(self, request, queryset, lambda row, actor: capture_stop(row, actor=actor))

    @admin.action(description="Revoke")
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        each(self, request, queryset, lambda row, actor: api_key_revoke(row, actor=actor))


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    list_display = ("at", "actor", "action", "target", "outcome", "detail", "address")
    list_filter = ("outcome", "action")
    search_fields = ("actor", "target", "detail")
    date_hierarchy = "at"
    show_full_result_count = False


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyAdmin):
    list_display = ("day", "key_name", "served_model_name", "requests", "errors", "prompt_tokens", "completion_tokens")
    list_filter = ("day",)
    search_fields = ("key_name", "served_model_name")


@admin.register(UsageSender)
class UsageSenderAdmin(ReadOnlyAdmin):
    list_display = ("sender", "sequence", "at")
    search_fields = ("sender",)


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin):
    list_display = ("at", "caller", "key", "status")
    search_fields = ("caller", "key")


@admin.register(Preset)
class PresetAdmin(ReadOnlyAdmin):
    list_display = ("name", "created_by", "updated_at")
    search_fields = ("name",)
