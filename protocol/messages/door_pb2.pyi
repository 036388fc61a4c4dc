from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromSite(_message.Message):
    __slots__ = ("hello", "proof", "reply", "alive")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proof: Proof
    reply: Letter
    alive: Alive
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., reply: _Optional[_Union[Letter, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class ToSite(_message.Message):
    __slots__ = ("challenge", "welcome", "request", "taken", "alive", "over")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    welcome: Welcome
    request: Letter
    taken: Taken
    alive: Alive
    over: Over
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., request: _Optional[_Union[Letter, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., over: _Optional[_Union[Over, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "token")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    version: str
    token: bytes
    def __init__(self, version: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("name", "key", "signature")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: bytes
    signature: bytes
    def __init__(self, name: _Optional[str] = ..., key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("key", "token")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    token: bytes
    def __init__(self, key: _Optional[bytes] = ..., token: _Optional[bytes] = ...) -> None: ...

class Letter(_message.Message):
    __slots__ = ("id", "frame", "vectors")
    ID_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    frame: bytes
    vectors: _containers.RepeatedCompositeFieldContainer[Vector]
    def __init__(self, id: _Optional[bytes] = ..., frame: _Optional[bytes] = ..., vectors: _Optional[_Iterable[_Union[Vector, _Mapping]]] = ...) -> None: ...

class Vector(_message.Message):
    __slots__ = ("hash", "size")
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    size: int
    def __init__(self, hash: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("id", "unasked")
    ID_FIELD_NUMBER: _ClassVar[int]
    UNASKED_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    unasked: bool
    def __init__(self, id: _Optional[bytes] = ..., unasked: _Optional[bool] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Over(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Part(_message.Message):
    __slots__ = ("vector", "data", "request")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    vector: Vector
    data: bytes
    request: bytes
    def __init__(self, vector: _Optional[_Union[Vector, _Mapping]] = ..., data: _Optional[bytes] = ..., request: _Optional[bytes] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("size", "whole")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    size: int
    whole: bool
    def __init__(self, size: _Optional[int] = ..., whole: _Optional[bool] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("hash", "offset")
    HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    offset: int
    def __init__(self, hash: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...
