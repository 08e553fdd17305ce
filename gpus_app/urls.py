"""This app has no pages of its own: see ``models_app.urls``, which knows what runs on the GPUs."""

from __future__ import annotations

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
