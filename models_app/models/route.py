"""Names whose requests are spread over several models by weight."""

from __future__ import annotations

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from models_app.models.model import Model, served_name_validator

#: Weights are shares of one another; a bound keeps them readable.
MAX_WEIGHT = 1000


class WeightedRoute(models.Model):
    """A name that clients ask for and that several models answer, each with its share of the requests.

    A name is never both this and an alias or a served model name.
    """

    name = models.CharField(max_length=128, unique=True, validators=[served_name_validator])
    request_defaults = models.JSONField(default=dict, blank=True, help_text="Used when a request has none.")
    created_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class RouteTarget(models.Model):
    """One model of a weighted route; of the requests it gets its weight over the sum of all weights."""

    route = models.ForeignKey(WeightedRoute, on_delete=models.CASCADE, related_name="targets")
    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="route_targets")
    weight = models.PositiveIntegerField(validators=[MinValueValidator(1), MaxValueValidator(MAX_WEIGHT)])

    class Meta:
        ordering = ["route", "model__served_model_name"]
        constraints = [
            models.UniqueConstraint(fields=["route", "model"], name="one_weight_per_model_of_a_route"),
            models.CheckConstraint(condition=models.Q(weight__gte=1), name="route_weight_is_positive"),
        ]

    def __str__(self) -> str:
        return f"{self.route} → {self.model} ({self.weight})"
