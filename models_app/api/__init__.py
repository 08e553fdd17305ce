"""The REST door for automation: thin, typed, one error shape. Everything is decided in the services."""
