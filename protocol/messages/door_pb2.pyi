from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromSite(_message.Message):
    __slots__ = ("hello", "proof", "reply", "alive", "commit", "reveal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REVEAL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proof: Proof
    reply: Letter
    alive: Alive
    commit: Commit
    reveal: Reveal
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., reply: _Optional[_Union[Letter, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., reveal: _Optional[_Union[Reveal, _Mapping]] = ...) -> None: ...

class ToSite(_message.Message):
    __slots__ = ("challenge", "welcome", "request", "taken", "alive", "over", "founded", "waiting", "document", "newest")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    FOUNDED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    welcome: Welcome
    request: Letter
    taken: Taken
    alive: Alive
    over: Over
    founded: Founded
    waiting: Waiting
    document: bytes
    newest: int
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., request: _Optional[_Union[Letter, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., over: _Optional[_Union[Over, _Mapping]] = ..., founded: _Optional[_Union[Founded, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., document: _Optional[bytes] = ..., newest: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("version", "commitment")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    version: str
    commitment: bytes
    def __init__(self, version: _Optional[str] = ..., commitment: _Optional[bytes] = ...) -> None: ...

class Founded(_message.Message):
    __slots__ = ("nonce", "name", "address", "authority")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    name: str
    address: str
    authority: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., authority: _Optional[bytes] = ...) -> None: ...

class Reveal(_message.Message):
    __slots__ = ("request", "nonce", "signature")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    request: str
    nonce: bytes
    signature: bytes
    def __init__(self, request: _Optional[str] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "name", "nonce", "installed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    version: str
    name: str
    nonce: bytes
    installed: int
    def __init__(self, version: _Optional[str] = ..., name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., installed: _Optional[int] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("key", "signature", "seen", "own")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    signature: bytes
    seen: Head
    own: Head
    def __init__(self, key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., seen: _Optional[_Union[Head, _Mapping]] = ..., own: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("number", "hash")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    number: int
    hash: str
    def __init__(self, number: _Optional[int] = ..., hash: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("key", "run", "seen")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    run: str
    seen: Head
    def __init__(self, key: _Optional[bytes] = ..., run: _Optional[str] = ..., seen: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...

class Letter(_message.Message):
    __slots__ = ("id", "frame", "vectors", "run", "envelope")
    ID_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    frame: bytes
    vectors: _containers.RepeatedCompositeFieldContainer[Vector]
    run: str
    envelope: bytes
    def __init__(self, id: _Optional[bytes] = ..., frame: _Optional[bytes] = ..., vectors: _Optional[_Iterable[_Union[Vector, _Mapping]]] = ..., run: _Optional[str] = ..., envelope: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("head",)
    HEAD_FIELD_NUMBER: _ClassVar[int]
    head: Head
    def __init__(self, head: _Optional[_Union[Head, _Mapping]] = ...) -> None: ...

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

class FromRun(_message.Message):
    __slots__ = ("begin", "ask", "taken", "withdrawn", "over")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    ask: Ask
    taken: Of
    withdrawn: Of
    over: Over
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., taken: _Optional[_Union[Of, _Mapping]] = ..., withdrawn: _Optional[_Union[Of, _Mapping]] = ..., over: _Optional[_Union[Over, _Mapping]] = ...) -> None: ...

class ToRun(_message.Message):
    __slots__ = ("seen", "answer")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    seen: Seen
    answer: Answer
    def __init__(self, seen: _Optional[_Union[Seen, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("run", "folder", "sites", "most_bytes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    run: str
    folder: str
    sites: _containers.RepeatedScalarFieldContainer[str]
    most_bytes: int
    def __init__(self, run: _Optional[str] = ..., folder: _Optional[str] = ..., sites: _Optional[_Iterable[str]] = ..., most_bytes: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("sites", "request", "paths", "deadline_s", "envelopes")
    SITES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedScalarFieldContainer[str]
    request: Letter
    paths: _containers.RepeatedScalarFieldContainer[str]
    deadline_s: float
    envelopes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sites: _Optional[_Iterable[str]] = ..., request: _Optional[_Union[Letter, _Mapping]] = ..., paths: _Optional[_Iterable[str]] = ..., deadline_s: _Optional[float] = ..., envelopes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Of(_message.Message):
    __slots__ = ("site", "request")
    SITE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    site: str
    request: bytes
    def __init__(self, site: _Optional[str] = ..., request: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("of", "frame", "paths", "failure", "seen")
    OF_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    of: Of
    frame: bytes
    paths: _containers.RepeatedScalarFieldContainer[str]
    failure: str
    seen: Site
    def __init__(self, of: _Optional[_Union[Of, _Mapping]] = ..., frame: _Optional[bytes] = ..., paths: _Optional[_Iterable[str]] = ..., failure: _Optional[str] = ..., seen: _Optional[_Union[Site, _Mapping]] = ...) -> None: ...

class Seen(_message.Message):
    __slots__ = ("sites",)
    SITES_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedCompositeFieldContainer[Site]
    def __init__(self, sites: _Optional[_Iterable[_Union[Site, _Mapping]]] = ...) -> None: ...

class Site(_message.Message):
    __slots__ = ("name", "online", "sent", "received")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ONLINE_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    online: bool
    sent: int
    received: int
    def __init__(self, name: _Optional[str] = ..., online: _Optional[bool] = ..., sent: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...
