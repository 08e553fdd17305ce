"""The channel layer: Redis pub/sub, with latest-wins consumers in front of every browser."""

from __future__ import annotations

from sardeenz_site.settings.celery import REDIS_URL

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "sardeenz_site.channel_layer.SharedPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "sardeenz"},
    }
}
