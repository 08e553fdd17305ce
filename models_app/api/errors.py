"""One shape for every error: ``{"error": {"code", "message", "fields"?, "facts"?}}``."""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, AuthorizationError, HttpError, Throttled, ValidationError

from models_app.errors import InvalidInput, SardeenzError


def _body(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": message} | {k: v for k, v in more.items() if v}}


def _field_name(loc: tuple[Any, ...]) -> str:
    """``("body", "payload", "size")`` is the field ``size``; our argument names mean nothing to a caller."""
    parts = [str(part) for part in loc]
    if len(parts) > 2 and parts[0] == "body":
        parts = parts[2:]
    elif len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts)


def install(api: NinjaAPI) -> None:
    """Translate every kind of failure into the one shape."""

    def answer(request: HttpRequest, body: dict[str, Any], status: int) -> HttpResponse:
        response = api.create_response(request, body, status=status)
        if status == 401:
            response["WWW-Authenticate"] = 'Bearer realm="sardeenz"'
        if status == 503:
            response["Retry-After"] = "5"
        return response

    @api.exception_handler(InvalidInput)
    def invalid(request: HttpRequest, exc: InvalidInput) -> HttpResponse:
        return answer(request, _body(exc.code, exc.message, fields=exc.fields), exc.status)

    @api.exception_handler(SardeenzError)
    def ours(request: HttpRequest, exc: SardeenzError) -> HttpResponse:
        return answer(request, _body(exc.code, exc.message, facts=exc.facts), exc.status)

    @api.exception_handler(ValidationError)
    def schema(request: HttpRequest, exc: ValidationError) -> HttpResponse:
        fields: dict[str, list[str]] = {}
        for error in exc.errors:
            fields.setdefault(_field_name(tuple(error["loc"])), []).append(str(error["msg"]))
        name, sentences = next(iter(fields.items()))
        return answer(request, _body("invalid", f"{name}: {sentences[0]}", fields=fields), 422)

    @api.exception_handler(AuthenticationError)
    def unauthenticated(request: HttpRequest, exc: AuthenticationError) -> HttpResponse:
        return answer(request, _body("unauthenticated", "Send a valid key as 'Authorization: Bearer <key>'."), 401)

    @api.exception_handler(AuthorizationError)
    def unauthorized(request: HttpRequest, exc: AuthorizationError) -> HttpResponse:
        return answer(request, _body("forbidden", str(exc) or "This key's role does not allow that."), 403)

    @api.exception_handler(Throttled)
    def throttled(request: HttpRequest, exc: Throttled) -> HttpResponse:
        return answer(request, _body("throttled", str(exc)), 429)

    @api.exception_handler(HttpError)
    def http(request: HttpRequest, exc: HttpError) -> HttpResponse:
        code = {400: "bad_request", 404: "not_found"}.get(exc.status_code, "error")
        return answer(request, _body(code, exc.message), exc.status_code)

    @api.exception_handler(Http404)
    def missing(request: HttpRequest, exc: Http404) -> HttpResponse:
        return answer(request, _body("not_found", str(exc) or "There is nothing here."), 404)

    @api.exception_handler(DatabaseError)
    def database(request: HttpRequest, exc: DatabaseError) -> HttpResponse:
        return answer(
            request, _body("database_unavailable", "The database did not answer; nothing was changed. Try again."), 503
        )


@csrf_exempt  # it changes nothing, and a page about a form would be no answer to a script
def nothing_here(request: HttpRequest) -> JsonResponse:
    """What no route takes (a line break in a name) is answered in the one shape too, by whatever method."""
    return JsonResponse(_body("not_found", "There is nothing here."), status=404)
