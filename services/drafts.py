"""`outrider drafts`: loads another version of the draft on a cluster's draft workers, takes it back, or lists them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from cluster.coordination.link import label_of
from cluster.errors import ConfigurationError
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc
from services.argument_types import share
from services.http_call import add_url_argument
from services.running_cluster.access import PoolAccess, access_of, add_access_arguments, config_of
from services.running_cluster.workers import WorkerFacts, look_around
from services.terminal import as_line

_SECONDS = 600.0  # a worker may take minutes to load a draft


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    load = actions.add_parser("load", help="load a version on the draft workers, one after the other")
    load.add_argument("folder", metavar="FOLDER", help="below `draft.load_root` on each worker's disk")
    add_share_argument(load)
    promote = actions.add_parser(
        "promote", help="load a version on all draft workers, and let those that start or join begin with it"
    )
    promote.add_argument("folder", metavar="FOLDER", help="below `draft.load_root`, on a disk that new workers share")
    rollback = actions.add_parser(
        "rollback", help="return to the version that each draft worker had before, and begin with that"
    )
    listed = actions.add_parser("list", help="list the draft workers with their versions and sequences")
    for action in (load, promote, rollback, listed):
        add_cluster_arguments(action)
        action.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.epilog = "example: outrider drafts load monday-48 --share 0.3 --url http://127.0.0.1:8000"


def add_share_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--share",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="share of the draft workers, from 0 to 1; default all. Without it later, the others follow",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration with the `tls` to use")
    add_access_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each draft worker. Returns 1 if one failed, after which no other is changed, or is unreachable.

    Raises ConfigurationError if the cluster has no draft workers.
    """
    access = access_of(arguments, config_of(arguments))
    facts = look_around(arguments.url, access)
    workers = facts.drafts
    if not workers:
        raise ConfigurationError(f"{arguments.url} has no draft workers")
    for reason in facts.unreachable:
        print(as_line(f"left out: {reason}"))
    if arguments.action == "list":
        for worker in workers:
            print(as_line(f"{worker.address}: {label_of(worker.model)}, {worker.load.num_running} sequences"))
        return 0
    if arguments.action == "rollback":
        code = _change(workers, draft_pb2.LoadDraftRequest(is_rollback=True), access.draft)
    else:
        promotes = arguments.action == "promote"
        chosen = workers if promotes else workers[: math.ceil(arguments.share * len(workers))]
        code = _change(chosen, draft_pb2.LoadDraftRequest(folder=arguments.folder), access.draft)
        if promotes and code == 0:
            request = draft_pb2.LoadDraftRequest(folder=arguments.folder, promotes=True)
            code = _change(workers, request, access.draft)
    return code or int(bool(facts.unreachable))


def _change(workers: Sequence[WorkerFacts], request: draft_pb2.LoadDraftRequest, access: PoolAccess) -> int:
    for worker in workers:
        with access.dialer.blocking_channel(worker.address) as channel:
            try:
                load: Any = draft_pb2_grpc.DraftStub(channel).LoadDraft  # type: ignore[arg-type]  # made for async ones
                said = load(request, timeout=_SECONDS)
            except grpc.RpcError as error:
                why = error.details() if isinstance(error, grpc.Call) else str(error)
                kept = "the version is not promoted" if request.promotes else f"keeps {label_of(worker.model)}"
                print(as_line(f"{worker.address}: failed, and {kept}: {why}"))
                return 1
        if not request.promotes:  # all have it already
            print(as_line(f"{worker.address}: {label_of(said.model)}"))
    return 0
