"""What the REST door takes and gives about keys, usage and captured requests. Times are ISO 8601 in UTC."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Literal

from ninja import Field, Schema
from pydantic import StrictBool, StringConstraints

from models_app.api.schemas import Name, Strict, Text
from models_app.models import ApiKey


class KeyIn(Strict):
    name: Annotated[Text, StringConstraints(min_length=1, max_length=64)]
    role: Literal["viewer", "operator", "admin"] = "viewer"
    models: list[Name] = []
    requests_per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None
    max_concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    priority: Annotated[int, Field(ge=0, le=100)] = Field(50, description="Highest first, among those that wait.")
    may_capture: StrictBool = Field(False, description="Role admin only; given by who may capture himself.")
    expires_at: datetime | None = None


class KeyPatch(Strict):
    """What is left out stays; null means no limit, or no end."""

    role: Literal["viewer", "operator", "admin"] = "viewer"
    models: list[Name] = []
    requests_per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None
    max_concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    may_capture: StrictBool = False
    expires_at: datetime | None = None


class RotateIn(Strict):
    grace_s: Annotated[int, Field(ge=0, le=30 * 86400, description="So long the old secret goes on; 0 ends it now.")]


class CaptureIn(Strict):
    seconds: Annotated[int, Field(ge=1, le=10**9)] = Field(3600, description="At most SARDEENZ_CAPTURE_MAX_S.")


class CapturedOut(Schema):
    """One request and its answer, cut and redacted; ``*_cut``: more was there. A stream's answer is its text."""

    at: datetime
    model: str
    path: str
    status: int
    request_id: str
    request: str
    request_cut: bool
    answer: str
    answer_cut: bool
    streamed: bool


class UsageSumOut(Schema):
    """Times are milliseconds, of streamed answers, estimated from histograms; null where there was none."""

    requests: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p95_ms: float | None


class UsageLineOut(UsageSumOut):
    """``day``, ``key`` and ``model`` are null where the line is the sum over all of them."""

    day: date | None
    key: str | None
    model: str | None


class UsageOut(Schema):
    """``count`` lines in all, of which ``items`` is the part asked for."""

    start: date
    end: date
    count: int
    totals: UsageSumOut
    items: list[UsageLineOut]


class KeyOut(Schema):
    name: str
    prefix: str
    role: str
    models: list[str]
    is_scoped: bool = Field(description="Good for these models only, also when all of them are deleted.")
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None
    priority: int
    may_capture: bool
    capture_until: datetime | None
    rotated_at: datetime | None
    previous_until: datetime | None = Field(description="Until when the secret from before the rotation works.")
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    created_by: str
    created_at: datetime

    @staticmethod
    def resolve_models(obj: ApiKey) -> list[str]:
        return [model.served_model_name for model in obj.allowed_models.all()]


class NewKeyOut(KeyOut):
    key: str = Field(description="Shown this once; only its digest is kept.")
