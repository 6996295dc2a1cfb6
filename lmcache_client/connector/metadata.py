"""What the scheduler side and the worker side of the connector send each other through vLLM."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from lmcache_client.contract.messages import Load, Store


@dataclass
class LoadJob:
    """One request's load. `job_id` names the destination blocks that are held until it is settled."""

    job_id: int
    request_id: str
    message: Load


@dataclass
class StoreJob:
    """One step's stores. `job_id` names the source blocks that are held until it is settled."""

    job_id: int
    message: Store


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing: the workers may wait a moment for the server."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, once a step: how many workers are through with which job."""

    settled: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.settled + other.settled)
