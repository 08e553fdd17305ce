"""Measurements of the whole product on a real GPU: ``python -m tests.gpu``. No part of ``make test``."""
