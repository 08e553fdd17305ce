"""Addresses of the WebSockets of this app."""

from __future__ import annotations

from django.urls import URLPattern, path

from models_app.consumers import LiveConsumer

websocket_urlpatterns: list[URLPattern] = [path("ws/live", LiveConsumer.as_asgi())]
