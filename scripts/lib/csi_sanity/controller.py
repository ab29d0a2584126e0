"""What stands between csi-sanity and the plugin, because the driver provisions no volumes and csi-sanity has none by itself.

It answers for a controller: each volume is the lake. Requests to the node and to the identity go on to the plugin byte by
byte, but that the controller is announced, and that a publish says `readonly`, as a pod does that asks for ReadWriteOnce.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from stepfs.csi.messages import MESSAGES, PACKAGE, classes

_CONTROLLER_SERVICE = 1  # PluginCapability.Service.Type
_CREATE_DELETE_VOLUME = 1  # ControllerServiceCapability.RPC.Type
_OURS = classes({
    "Service": "type:int32=1",
    "PluginCapability": "service:Service=1",
    "GetPluginCapabilitiesResponse": "capabilities:*PluginCapability=1",
    "RPC": "type:int32=1",
    "ControllerServiceCapability": "rpc:RPC=1",
    "ControllerGetCapabilitiesRequest": "",
    "ControllerGetCapabilitiesResponse": "capabilities:*ControllerServiceCapability=1",
    "CreateVolumeRequest": "name:string=1",
    "Volume": "capacity_bytes:int64=1 volume_id:string=2 volume_context:map=3",
    "CreateVolumeResponse": "volume:Volume=1",
    "DeleteVolumeRequest": "volume_id:string=1",
    "DeleteVolumeResponse": "",
})  # fmt: skip
_FORWARDED = {
    "Identity": ("GetPluginInfo", "Probe"),
    "Node": (
        "NodeUnpublishVolume", "NodeGetVolumeStats", "NodeGetCapabilities", "NodeGetInfo", "NodeStageVolume",
        "NodeUnstageVolume", "NodeExpandVolume",
    ),
}  # fmt: skip

Answer = Callable[[bytes, Any], bytes]


def serve(endpoint: str, plugin: str, lake: str) -> grpc.Server:
    """Listens on the socket `endpoint`, before the plugin's."""
    channel = grpc.insecure_channel(f"unix://{plugin}")
    grpc.channel_ready_future(channel).result(timeout=60)

    def forwarded(service: str, name: str) -> Answer:
        call: Any = channel.unary_unary(f"/{PACKAGE}.{service}/{name}")

        def answer(request: bytes, context: Any) -> bytes:
            try:
                response: bytes = call(request, timeout=60)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            return response

        return answer

    def publish(request: bytes, context: Any) -> bytes:
        message = MESSAGES["NodePublishVolumeRequest"].FromString(request)
        message.readonly = True
        return forwarded("Node", "NodePublishVolume")(message.SerializeToString(), context)

    def create(request: bytes, _: Any) -> bytes:
        name = _OURS["CreateVolumeRequest"].FromString(request).name
        volume = {"volume_id": name, "volume_context": {"lake": lake}}
        return bytes(_OURS["CreateVolumeResponse"](volume=volume).SerializeToString())

    def constant(name: str, **fields: Any) -> Answer:
        made = bytes(_OURS[name](**fields).SerializeToString())
        return lambda *_: made

    answers: dict[str, dict[str, Answer]] = {
        service: {name: forwarded(service, name) for name in names} for service, names in _FORWARDED.items()
    }
    provides = [{"service": {"type": _CONTROLLER_SERVICE}}]
    answers["Identity"]["GetPluginCapabilities"] = constant("GetPluginCapabilitiesResponse", capabilities=provides)
    answers["Node"]["NodePublishVolume"] = publish
    makes = [{"rpc": {"type": _CREATE_DELETE_VOLUME}}]
    answers["Controller"] = {
        "ControllerGetCapabilities": constant("ControllerGetCapabilitiesResponse", capabilities=makes),
        "CreateVolume": create,
        "DeleteVolume": constant("DeleteVolumeResponse"),
    }
    server = grpc.server(ThreadPoolExecutor(8))
    for service, methods in answers.items():
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in methods.items()
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers)])
    server.add_insecure_port(f"unix://{endpoint}")
    server.start()
    return server
