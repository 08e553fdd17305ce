"""Hosts, GPUs and readings in Django's admin. What was observed is read-only; acts go through the services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from gpus_app.models import Gpu, GpuPolicy, GpuSample, Host
from gpus_app.services import (
    gpu_cordon,
    gpu_hold,
    gpu_hold_end,
    gpu_uncordon,
    host_cordon,
    host_maintenance_set,
    host_uncordon,
)

HOLD_S = 3600.0

if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
else:  # generic for the type checker only
    Base = admin.ModelAdmin


class ObservedAdmin(Base):
    """Rows that workers write: shown, never typed in."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Host)
class HostAdmin(Base):
    list_display = ("name", "address", "engine_kind", "cordoned", "maintenance", "worker_seen_at", "sampler_seen_at")
    list_filter = ("engine_kind", "cordoned", "maintenance")
    search_fields = ("name", "address", "note")
    fields = (
        "name",
        "address",
        "engine_kind",
        "versions",
        "total_ram_bytes",
        "available_ram_bytes",
        "total_shm_bytes",
        "available_shm_bytes",
        "cordoned",
        "maintenance",
        "note",
        "worker_seen_at",
        "sampler_seen_at",
        "created_at",
    )
    readonly_fields = tuple(name for name in fields if name != "address")
    actions: tuple[str, ...] = ("cordon", "maintenance", "end_maintenance", "uncordon")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # a host enters itself when its worker starts

    @admin.action(description="Cordon: no new instances")
    def cordon(self, request: HttpRequest, queryset: QuerySet[Host]) -> None:
        for host in queryset:
            host_cordon(host, actor=request.user.get_username())

    @admin.action(description="Maintenance: nothing is placed or restarted there")
    def maintenance(self, request: HttpRequest, queryset: QuerySet[Host]) -> None:
        for host in queryset:
            host_maintenance_set(host, on=True, actor=request.user.get_username(), note=host.note)

    @admin.action(description="End maintenance; it stays cordoned")
    def end_maintenance(self, request: HttpRequest, queryset: QuerySet[Host]) -> None:
        for host in queryset:
            host_maintenance_set(host, on=False, actor=request.user.get_username())

    @admin.action(description="Open for new instances")
    def uncordon(self, request: HttpRequest, queryset: QuerySet[Host]) -> None:
        for host in queryset:
            host_uncordon(host, actor=request.user.get_username())


@admin.register(Gpu)
class GpuAdmin(ObservedAdmin):
    list_display = ("host", "index", "name", "total_bytes", "state", "grade", "state_since", "cordoned", "seen_at")
    list_filter = ("state", "grade", "cordoned", "host")
    list_select_related = ("host",)
    search_fields = ("uuid", "name")
    actions = ("cordon", "uncordon", "hold", "end_hold")

    @admin.action(description="Cordon: no new instances")
    def cordon(self, request: HttpRequest, queryset: QuerySet[Gpu]) -> None:
        for gpu in queryset.select_related("host"):
            gpu_cordon(gpu, actor=request.user.get_username())

    @admin.action(description="Open for new instances")
    def uncordon(self, request: HttpRequest, queryset: QuerySet[Gpu]) -> None:
        for gpu in queryset.select_related("host"):
            gpu_uncordon(gpu, actor=request.user.get_username())

    @admin.action(description="Hold the controller for an hour")
    def hold(self, request: HttpRequest, queryset: QuerySet[Gpu]) -> None:
        gpu_hold(queryset.select_related("host"), actor=request.user.get_username(), seconds=HOLD_S)

    @admin.action(description="Let the controller go on")
    def end_hold(self, request: HttpRequest, queryset: QuerySet[Gpu]) -> None:
        gpu_hold_end(queryset.select_related("host"), actor=request.user.get_username())


@admin.register(GpuPolicy)
class GpuPolicyAdmin(ObservedAdmin):
    """Changed on the Policies page, where impossible sets are refused with the numbers."""

    list_display = ("gpu", "reserve_bytes", "rebalance", "held_until", "held_by", "planned_at")
    list_select_related = ("gpu__host",)
    list_filter = ("rebalance",)


@admin.register(GpuSample)
class GpuSampleAdmin(ObservedAdmin):
    list_display = ("gpu", "at", "resolution_s", "used_bytes", "utilization_percent", "temperature_c", "power_w")
    list_select_related = ("gpu__host",)
    list_filter = ("resolution_s",)
    show_full_result_count = False
