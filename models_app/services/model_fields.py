"""The fields of a model as people and scripts give them: read strictly, one sentence for each that is wrong.

Only what can be told from the value itself is judged here; what needs the fleet or the weights is judged in
``model_check``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpus_app.models import Host
from models_app.errors import InvalidInput
from models_app.models import SERVED_NAME_RE, MemoryPolicy, Model
from models_app.services.memory.placement import FOOTPRINT_OPTIONS
from models_app.services.sizes import parse_size

DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float")
LOAD_FORMATS = (
    "",
    "auto",
    "dummy",
    "safetensors",
    "pt",
    "npcache",
    "bitsandbytes",
    "gguf",
    "mistral",
    "fastsafetensors",
    "runai_streamer",
    "sharded_state",
    "tensorizer",
)
#: Sampling options that a model may have of its own; the request's value counts when there is one.
REQUEST_DEFAULTS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "max_completion_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "n",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
        "reasoning_effort",
    }
)
_NAME_RULE = "Use letters, digits and . _ - / : (at most 128, beginning and ending with a letter or digit)."
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_YES = frozenset({"true", "on", "yes", "1"})
_NO = frozenset({"false", "off", "no", "0", ""})


class _Wrong(ValueError):
    """A value that cannot stand, with its sentence."""


def _text(maximum: int) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str):
            raise _Wrong("Give a text.")
        if "\0" in value:
            raise _Wrong("A text cannot hold a zero character.")
        if len(value) > maximum:
            raise _Wrong(f"At most {maximum} characters.")
        return value.strip()

    return read


def _choice(values: Iterable[str]) -> Callable[[Any], str]:
    allowed = tuple(values)

    def read(value: Any) -> str:
        text = "" if value is None else str(value).strip()
        if text not in allowed:
            raise _Wrong(f"{text[:60]!r} is not one of {', '.join(one or '(empty)' for one in allowed)}.")
        return text

    return read


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value is None:
        return False
    text = str(value).strip().lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    raise _Wrong(f"{text[:20]!r} is neither true nor false.")


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise _Wrong("Give a whole number.")
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise _Wrong("Give a whole number.") from None
        if not low <= number <= high:
            raise _Wrong(f"Use a number from {low:,} to {high:,}.")
        return number

    return read


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def maybe(value: Any) -> Any:
        return None if value is None or value == "" else read(value)

    return maybe


def _bytes(*, zero: bool = False) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if zero and str(value).strip() in ("0", "0.0"):
            return 0
        try:
            return parse_size(value)
        except InvalidInput as exc:
            raise _Wrong(exc.fields["size"][0]) from exc

    return read


def _served_name(value: Any) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not text:
        raise _Wrong("Give the name by which clients ask for the model.")
    if not SERVED_NAME_RE.match(text):
        raise _Wrong(_NAME_RULE)
    return text


def _aliases(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        value = re.split(r"[\s,]+", value)
    if not isinstance(value, (list, tuple)):
        raise _Wrong("Give a list of names.")
    names = [str(name).strip() for name in value if str(name).strip()]
    for name in names:
        if not SERVED_NAME_RE.match(name):
            raise _Wrong(f"{name[:60]!r}: {_NAME_RULE}")
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise _Wrong(f"{doubled[0]!r} stands there twice.")
    return names


def _uuids(value: Any) -> list[str]:
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = re.split(r"[\s,]+", value.strip())
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise _Wrong("Give a list of GPU UUIDs.")
    return list(value)


def _host(value: Any) -> Host | None:
    if value is None or value == "":
        return None
    if isinstance(value, Host):
        return value
    found = Host.objects.filter(name=str(value)).first()
    if found is None:
        raise _Wrong(f"There is no host named {str(value)[:64]!r}.")
    return found


def _model(value: Any) -> Model | None:
    if value is None or value == "":
        return None
    if isinstance(value, Model):
        return value
    found = Model.objects.filter(served_model_name=str(value)).first()
    if found is None:
        raise _Wrong(f"There is no model named {str(value)[:128]!r}.")
    return found


def _json(value: Any) -> Any:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            raise _Wrong("This is no JSON object.") from None
    return value


def _defaults(value: Any) -> dict[str, Any]:
    value = _json(value)
    if not isinstance(value, dict):
        raise _Wrong("Give a JSON object of sampling options.")
    return _sampling(value)


def _sampling(value: dict[str, Any]) -> dict[str, Any]:
    """Options that a request may have a default for, and no others."""
    strange = sorted(set(map(str, value)) - REQUEST_DEFAULTS)
    if strange:
        raise _Wrong(f"{strange[0][:40]!r} is no option that a model can have a default for.")
    return value


def _alias_defaults(value: Any) -> dict[str, dict[str, Any]]:
    value = _json(value)
    if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
        raise _Wrong('Give a JSON object of aliases, each with its options: {"my-alias": {"temperature": 0}}.')
    return {str(name): _sampling(one) for name, one in value.items()}


READERS: dict[str, Callable[[Any], Any]] = {
    "served_model_name": _served_name,
    "aliases": _aliases,
    "source": _choice(Model.Source.values),
    "model": _text(1024),
    "hf_revision": _text(128),
    "max_model_len": _optional(_whole(1, 100_000_000)),
    "dtype": _choice(DTYPES),
    "quantization": _text(32),
    "tensor_parallel_size": _whole(1, 64),
    "enforce_eager": _flag,
    "enable_sleep_mode": _flag,
    "enable_prefix_caching": _flag,
    "kvcached": _flag,
    "kv_layout": _choice(Model.KvLayout.values),
    "extra_args": _text(8000),
    "load_format": _choice(LOAD_FORMATS),
    "replicas": _whole(1, 64),
    "host": _host,
    "gpu_uuids": _uuids,
    "initial_limit_bytes": _optional(_bytes()),
    "restart_policy": _choice(Model.RestartPolicy.values),
    "on_demand": _flag,
    "pinned": _flag,
    "idle_sleep_after_s": _optional(_whole(10, 30 * 86400)),
    "sleep_level": _whole(1, 2),
    "request_defaults": _defaults,
    "alias_defaults": _alias_defaults,
    "fallback": _model,
    "prefix_affinity": _flag,
    "first_byte_limit_s": _optional(_whole(1, 86_400)),
    "idle_limit_s": _optional(_whole(1, 86_400)),
    "max_concurrency": _optional(_whole(1, 1_000_000)),
}
POLICY_READERS: dict[str, Callable[[Any], Any]] = {
    "guarantee_bytes": _bytes(zero=True),
    "maximum_bytes": _optional(_bytes()),
    "priority": _whole(0, 100),
    "idle_shrink_after_s": _optional(_whole(10, 30 * 86400)),
    "reclaim": _choice(MemoryPolicy.Reclaim.values),
}
#: A change of one of these is another command line: instances run on with the old one until they are restarted.
ENGINE_FIELDS = frozenset({"served_model_name", "aliases", "source", "model", *FOOTPRINT_OPTIONS})
_REQUIRED = ("served_model_name", "source", "model")


def read_fields(
    fields: Mapping[str, Any], *, model: Model | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Every given field in its type, and the sentences of those that could not be read.

    For a new model the missing ones take their defaults; for an existing one they stay out.
    """
    readers = READERS | POLICY_READERS
    values: dict[str, Any] = {}
    wrong: dict[str, list[str]] = {}
    for name, value in fields.items():
        if name not in readers:
            wrong[name] = ["There is no such field."]
            continue
        try:
            values[name] = readers[name](value)
        except _Wrong as exc:
            wrong[name] = [str(exc)]
    if model is None:
        for name in _REQUIRED:
            if name not in values and name not in wrong:
                wrong[name] = ["This is needed."]
    revision = values.get("hf_revision")
    if revision and not _REVISION.fullmatch(revision):
        wrong["hf_revision"] = ["Give a branch, tag or commit: letters, digits and . _ - / only."]
    return values, wrong


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a Hugging Face id (``owner/name``, or an old plain name)."""
    return bool(_HUB_ID.fullmatch(text)) and ".." not in text and "--" not in text
