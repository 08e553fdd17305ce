"""/api/v1: every operation of the dashboard, for scripts."""

from __future__ import annotations

from ninja import NinjaAPI
from ninja.openapi.docs import ABS_TPL_PATH, Swagger

from gpus_app.api import read_router as gpu_reads
from gpus_app.api import write_router as gpu_writes
from models_app.api import errors
from models_app.api.admin_routes import router as admin_routes
from models_app.api.auth import admin, operator, viewer
from models_app.api.changes import router as changes
from models_app.api.instances import router as instances
from models_app.api.keys import router as keys
from models_app.api.memory import router as memory
from models_app.api.models import router as models
from models_app.api.routes import router as routes
from models_app.api.usage import router as usage


class OwnSwagger(Swagger):
    """With files of our own origin: the policy of our pages lets nothing come from a CDN."""

    template_cdn = str(ABS_TPL_PATH / "swagger.html")


api = NinjaAPI(
    title="Sardeenz",
    version="1.0.0",
    urls_namespace="api-v1",
    description=(
        "Launch, watch and control vLLM instances that share GPUs. Send a key as `Authorization: Bearer <key>`. "
        "Roles rise from viewer over operator to admin. KV bytes are per GPU."
    ),
    docs=OwnSwagger(settings={"persistAuthorization": True}),
)
errors.install(api)
# Before /models, whose paths take any name.
api.add_router("", changes, auth=viewer, tags=["changes"])
api.add_router("", memory, auth=viewer, tags=["KV memory"])
api.add_router("/models", models, auth=viewer, tags=["models"])
api.add_router("/routes", routes, auth=viewer, tags=["weighted routes"])
api.add_router("/instances", instances, auth=viewer, tags=["instances"])
api.add_router("", gpu_reads, auth=viewer, tags=["hosts and GPUs"])
api.add_router("", gpu_writes, auth=operator, tags=["hosts and GPUs"])
api.add_router("", usage, auth=viewer, tags=["usage"])
api.add_router("", keys, auth=admin, tags=["keys"])
api.add_router("", admin_routes, auth=admin, tags=["administration"])
