"""Ray actors of both sides and the controller that drives them.

Imports nothing: engine workers load `worker_extension` from here, and they need neither ray nor pydantic.
"""
