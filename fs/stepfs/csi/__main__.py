"""The two programs of the driver's pod: `plugin`, which kubelet calls, and `holder`, which has the daemons."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from stepfs import __version__
from stepfs.csi.holder import hold, listens
from stepfs.errors import MissingPackageError, StepfsError
from stepfs.format.arguments import parse_log_format
from stepfs.mount.logs import Json, Text

_NAME: Final = "stepfs.csi"
_THREADS: Final = 64  # a publish may wait a minute for a silent store, and Probe must be answered meanwhile
_log = logging.getLogger("stepfs.csi")


def _path(text: str) -> str:
    """Kubernetes writes sockets as URLs, too."""
    path = text.removeprefix("unix://")
    if not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is no absolute path; write one such as /csi/csi.sock")
    return path


def parsed(arguments: list[str]) -> argparse.Namespace:
    shows = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m stepfs.csi", description=__doc__, formatter_class=shows)
    parser.add_argument("role", choices=["plugin", "holder"])
    parser.add_argument("--endpoint", type=_path, default="/csi/csi.sock", help="the plugin's socket, for kubelet")
    parser.add_argument("--holder", type=_path, default="/run/stepfs-csi/holder.sock", help="the holder's socket")
    parser.add_argument("--base", type=_path, default="/var/lib/stepfs/csi", help="where the plugin mounts volumes")
    parser.add_argument("--node", default=os.uname().nodename, help="this node's name in the cluster")
    parser.add_argument("--metrics-port", type=int, help="the plugin serves /metrics of all volumes' daemons here")
    parser.add_argument("--metrics-address", default="0.0.0.0", help="and on this address")  # noqa: S104 (a pod's own)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = parsed(arguments)
    try:
        log_as = parse_log_format(os.environ.get("STEPFS_LOG_FORMAT") or "text")
    except StepfsError as error:
        return _ends_with(error)
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if log_as == "json" else Text("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if given.role == "holder":
        Path(given.holder).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        hold(Path(given.holder))
        return 0
    try:
        return serve(given)
    except ModuleNotFoundError as error:
        if error.name not in {"grpc", "google"}:
            raise
        return _ends_with(MissingPackageError("the driver needs the package grpcio: pip install 'stepfs[csi]'"))
    except StepfsError as error:
        return _ends_with(error)


def _ends_with(error: StepfsError) -> int:
    sys.stderr.write(f"stepfs: {error}\n")
    return error.exit_code


def serve(given: argparse.Namespace) -> int:
    """Answer kubelet until a signal."""
    import grpc  # noqa: PLC0415 - of the extra `csi`
    from prometheus_client.registry import CollectorRegistry  # noqa: PLC0415 - not for `holder`

    from stepfs._internal.scrape import served  # noqa: PLC0415
    from stepfs.csi.messages import GET_VOLUME_STATS, MESSAGES, PACKAGE, VOLUME_CONDITION  # noqa: PLC0415
    from stepfs.csi.node import RpcError, Scraped, Volumes  # noqa: PLC0415

    holder, volumes = Path(given.holder), Volumes(Path(given.base), Path(given.holder))
    capabilities = [{"rpc": {"type": number}} for number in (GET_VOLUME_STATS, VOLUME_CONDITION)]
    answers: dict[str, dict[str, Callable[[Any], Any]]] = {
        "Identity": {
            "GetPluginInfo": lambda _: MESSAGES["GetPluginInfoResponse"](name=_NAME, vendor_version=__version__),
            "GetPluginCapabilities": lambda _: MESSAGES["GetPluginCapabilitiesResponse"](),
            "Probe": lambda _: MESSAGES["ProbeResponse"](ready={"value": listens(holder)}),
        },
        "Node": {
            "NodePublishVolume": volumes.publish,
            "NodeUnpublishVolume": volumes.unpublish,
            "NodeGetVolumeStats": volumes.stats,
            "NodeGetCapabilities": lambda _: MESSAGES["NodeGetCapabilitiesResponse"](capabilities=capabilities),
            "NodeGetInfo": lambda _: MESSAGES["NodeGetInfoResponse"](node_id=given.node),
        },
    }

    def handler(name: str, answer: Callable[[Any], Any]) -> Any:
        def called(request: Any, context: Any) -> Any:
            try:
                return answer(request)
            except RpcError as error:
                _log.warning("%s: %s", name, error)
                context.abort(error.code, str(error))
            except Exception as error:  # noqa: BLE001 (the edge: gRPC's own line names no request)
                _log.exception("%s", name)
                context.abort(grpc.StatusCode.INTERNAL, f"{name}: {error}")

        return grpc.unary_unary_rpc_method_handler(
            called,
            request_deserializer=MESSAGES[f"{name}Request"].FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )

    server = grpc.server(ThreadPoolExecutor(_THREADS))
    for service, methods in answers.items():
        handlers = {name: handler(name, answer) for name, answer in methods.items()}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", handlers)])
    Path(given.endpoint).unlink(missing_ok=True)
    server.add_insecure_port(f"unix://{given.endpoint}")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with ExitStack() as scraped:
        if given.metrics_port is not None:
            registry = CollectorRegistry()
            registry.register(Scraped(volumes, given.node))
            scraped.enter_context(served(given.metrics_port, registry, address=given.metrics_address))
        server.start()
        _log.info("node %s serves volumes below %s", given.node, given.base)
        ended.wait()
        server.stop(grace=5.0).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
