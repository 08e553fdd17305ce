"""Every door's addresses, put together."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth import views as auth_views
from django.urls import include, path, re_path

from models_app.api.errors import nothing_here
from models_app.api.v1 import api
from sardeenz_site.health import healthz, readyz
from sardeenz_site.login import LoginView
from sardeenz_site.metrics import metrics

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("metrics", metrics, name="metrics"),
    path("api/v1/", api.urls),
    re_path(r"^api/v1/[\s\S]*$", nothing_here),
    path("login/", LoginView.as_view(), name="login"),
    path("logout/", auth_views.LogoutView.as_view(), name="logout"),
    # Before the admin's own: that login page has no limit.
    path("admin/login/", LoginView.as_view()),
    path("admin/", admin.site.urls),
    path("", include("models_app.urls")),
]
