"""The messages of CSI v1 that a node plugin takes and gives, with CSI's own names and field numbers.

They are built when they are imported; a compiler of protobuf and its output in the tree are not needed. A `oneof` is
written as its fields, and an enum as a number: on the wire they are the same.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "csi.v1"

# name:type=number; * repeated, map a map of texts, a capital letter another message.
_MESSAGES: Final = {
    "BoolValue": "value:bool=1",
    "GetPluginInfoRequest": "",
    "GetPluginInfoResponse": "name:string=1 vendor_version:string=2",
    "GetPluginCapabilitiesRequest": "",
    "GetPluginCapabilitiesResponse": "",
    "ProbeRequest": "",
    "ProbeResponse": "ready:BoolValue=1",
    "MountVolume": "fs_type:string=1 mount_flags:*string=2",
    "BlockVolume": "",
    "AccessMode": "mode:int32=1",
    "VolumeCapability": "block:BlockVolume=1 mount:MountVolume=2 access_mode:AccessMode=3",
    "NodePublishVolumeRequest": (
        "volume_id:string=1 target_path:string=4 volume_capability:VolumeCapability=5 readonly:bool=6 secrets:map=7 "
        "volume_context:map=8"
    ),
    "NodePublishVolumeResponse": "",
    "NodeUnpublishVolumeRequest": "volume_id:string=1 target_path:string=2",
    "NodeUnpublishVolumeResponse": "",
    "NodeGetVolumeStatsRequest": "volume_id:string=1 volume_path:string=2",
    "VolumeUsage": "available:int64=1 total:int64=2 used:int64=3 unit:int32=4",
    "VolumeCondition": "abnormal:bool=1 message:string=2",
    "NodeGetVolumeStatsResponse": "usage:*VolumeUsage=1 volume_condition:VolumeCondition=2",
    "RPC": "type:int32=1",
    "NodeServiceCapability": "rpc:RPC=1",
    "NodeGetCapabilitiesRequest": "",
    "NodeGetCapabilitiesResponse": "capabilities:*NodeServiceCapability=1",
    "NodeGetInfoRequest": "",
    "NodeGetInfoResponse": "node_id:string=1 max_volumes_per_node:int64=2",
}
_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
}

# Numbers of CSI's enums.
BYTES: Final = 1  # VolumeUsage.Unit
READERS: Final = {2, 3}  # AccessMode.Mode: SINGLE_NODE_READER_ONLY, MULTI_NODE_READER_ONLY
WRITERS: Final = {1: "ReadWriteOnce", 4: "ReadWriteMany", 5: "ReadWriteMany", 6: "ReadWriteOncePod", 7: "ReadWriteOnce"}
ONCE: Final = {1, 7}  # which many write out of habit
GET_VOLUME_STATS: Final = 2  # NodeServiceCapability.RPC.Type
VOLUME_CONDITION: Final = 4


def classes(messages: dict[str, str]) -> dict[str, Any]:
    """Name → class, of messages that are written as above and name none but each other."""
    file = descriptor_pb2.FileDescriptorProto(name="stepfs_csi.proto", package=PACKAGE, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            label, _, rest = field.partition(":")
            kind, _, number = rest.partition("=")
            repeated = kind.startswith("*") or kind == "map"
            made = message.field.add(name=label, number=int(number))
            made.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in _SCALARS:
                made.type = _SCALARS[kind]
                continue
            made.type = _FIELD.TYPE_MESSAGE
            if kind == "map":
                kind = f"{name}.{label.title().replace('_', '')}Entry"
                entry = message.nested_type.add(name=kind.partition(".")[2])
                entry.options.map_entry = True
                for part, place in (("key", 1), ("value", 2)):
                    entry.field.add(name=part, number=place, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
            made.type_name = f".{PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in messages}


MESSAGES: Final = classes(_MESSAGES)  # name → class
