"""The exceptions of Ray that shim.py may meet, with their base classes."""


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class RpcError(RayError):
    pass


class OutOfMemoryError(RayError):
    pass


class RayActorError(RayError):
    pass


class ActorDiedError(RayActorError):
    pass


class ActorUnavailableError(RayActorError):
    pass
