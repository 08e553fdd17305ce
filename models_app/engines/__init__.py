"""Engines: how an instance is started, followed, spoken to and ended. Plain Python, no Django.

The guardian imports this package with the standard library alone: keep this file empty of imports.
"""
