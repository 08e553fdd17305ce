"""What the Hugging Face Hub, or this host's cache of it, knows of a model: config.json and the size of its weights."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

_LIMIT_S = 10.0
_CONFIG_LIMIT_BYTES = 4 << 20
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1, "F4": 0.5,
}  # fmt: skip


class HubError(ValueError):
    """The Hub cannot say; the text is a sentence."""


def hub_cache() -> Path:
    """Where Hugging Face keeps downloads of this user, by the same variables and in the same order as its library."""
    if explicit := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"


def cached_snapshot(model: str, revision: str = "main") -> Path | None:
    """The folder of a downloaded model; None when its config.json is not there."""
    if not _ID.fullmatch(model) or "/" in revision or revision.startswith("."):
        return None
    folder = hub_cache() / f"models--{model.replace('/', '--')}"
    commit = revision
    with contextlib.suppress(OSError):  # a commit has no ref of its own
        commit = (folder / "refs" / revision).read_text().strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and (snapshot / "config.json").is_file() else None


def fetch(
    model: str, token: str | None, revision: str = "main", *, transport: httpx.BaseTransport | None = None
) -> tuple[dict[str, Any], int | None]:
    """config.json and the bytes of the weights (None: not told), over the network. Raises HubError."""
    if not _ID.fullmatch(model):
        raise HubError(f"{model!r} is not a Hugging Face id.")
    if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
        raise HubError(f"{model} is not in this host's cache, and HF_HUB_OFFLINE forbids to ask the Hub.")
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    at = quote(revision, safe="")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(headers=headers, timeout=_LIMIT_S, follow_redirects=True, transport=transport) as client:
            config = _checked(client.get(f"{base}/{model}/resolve/{at}/config.json"), model)
            if len(config.content) > _CONFIG_LIMIT_BYTES:
                raise HubError(f"The config.json of {model} is too large to be one.")
            about = client.get(f"{base}/api/models/{model}/revision/{at}", params={"blobs": "true"})
    except (httpx.HTTPError, OSError) as exc:
        raise HubError(f"{base} cannot be reached to look {model} up: {exc or type(exc).__name__}.") from exc
    try:
        body = config.json()
    except ValueError as exc:
        raise HubError(f"The config.json of {model} is not JSON.") from exc
    if not isinstance(body, dict):
        raise HubError(f"The config.json of {model} does not hold an object.")
    return body, _weights(about)


def _checked(answer: httpx.Response, model: str) -> httpx.Response:
    if answer.status_code in (401, 403):
        raise HubError(
            f"Hugging Face does not let us read {model}: it is gated, private or unknown. Accept its terms there and "
            "give the worker a HF_TOKEN of that account."
        )
    if answer.status_code == 404:
        raise HubError(f"Hugging Face has no config.json of {model}, or no such revision.")
    if answer.is_error:
        raise HubError(f"Hugging Face answered {answer.status_code} for {model}.")
    return answer


def _weights(about: httpx.Response) -> int | None:
    """From the tensors that the Hub has counted, else from the sizes of the files that vLLM would load."""
    try:
        body = about.json() if about.is_success else {}
        counted = body.get("safetensors", {}).get("parameters", {}) if isinstance(body, dict) else {}
        if counted and all(kind in _BYTES for kind in counted):
            return int(sum(_BYTES[kind] * count for kind, count in counted.items()))
        sizes = {item["rfilename"]: item.get("size") or 0 for item in body.get("siblings", [])}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    for suffix in (".safetensors", ".bin"):
        found = sum(size for name, size in sizes.items() if name.endswith(suffix) and "/" not in name)
        if found:
            return int(found)
    return None
