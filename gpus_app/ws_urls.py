"""This app opens no socket of its own: readings travel over ``/ws/live`` of models_app."""

from __future__ import annotations

from django.urls import URLPattern

websocket_urlpatterns: list[URLPattern] = []
