"""ServedModel: one model as an HTTP process serves it; ModelParts: what it is made of before its engines are ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chairlift.models.checkpoint import Checkpoint, open_checkpoint
from chairlift.models.sources import resolve
from chairlift.offline.defaults import read_defaults
from chairlift.offline.vocabulary import read_tokenizer
from chairlift.routing.pools import Pools
from chairlift.routing.router import Router
from chairlift.serving.accounts import Accounts, SharedLoads
from chairlift.serving.admission import Admission, queue_names
from chairlift.serving.beat import Beat
from chairlift.serving.encoding import Reader
from chairlift.serving.engine_client import EngineClient
from chairlift.serving.engine_metrics import EngineMetrics
from chairlift.serving.families import Families
from chairlift.serving.fleet import Fleet
from chairlift.serving.keys import Keyring
from chairlift.serving.messages import Stats
from chairlift.serving.metrics import Metrics
from chairlift.serving.plan import ModelPlan, Plan
from chairlift.serving.text_pool import TextPool
from chairlift.text.message import Family

WAITING_TOKENS = 1 << 20  # prompt tokens; each takes some 70 bytes in both processes together


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model: its engines, its tokenizer, its metrics and its queue."""

    name: str
    fleet: Fleet
    reader: Reader
    metrics: Metrics
    admission: Admission


class ModelParts:
    """The parts of a model that do not wait for its engines: these load the model meanwhile."""

    def __init__(
        self,
        plan: Plan,
        model: ModelPlan,
        worker: int,
        beats: Mapping[str, Beat],
        families: Families,
        accounts: Accounts,
    ) -> None:
        self.name = model.name
        self._plan = plan
        self._accounts = accounts
        self.metrics = Metrics(model.name, scheduling=plan.scheduling, families=families)
        engines = {each.name: each for each in plan.engines if each.model == model}
        self._loads = SharedLoads(accounts)
        self._router = Router(engines, plan.routing, loads=self._loads)
        clients = {}
        for name, engine in engines.items():
            watcher = Watcher(self._router, self._loads, name, self.metrics.of_engine(str(engine.replica)))
            clients[name] = EngineClient(plan.socket_of(worker, engine), beats[name], watcher)

        def moved(name: str) -> None:
            self.metrics.of_engine(str(engines[name].replica)).moved()

        pools = Pools({name: engine.role for name, engine in engines.items()})
        addresses = {name: plan.kv_address_of(each) for name, each in engines.items() if each.role != "prefill"}
        self.fleet = Fleet(clients, self._router, moved, pools, addresses if pools.are_apart else None)
        checkpoint = checkpoint_of(model, plan)
        self.defaults = read_defaults(checkpoint, plan.sampling)
        tokenizer, missing = read_tokenizer(model.model, checkpoint)
        self.texts = TextPool(tokenizer)
        self.texts.start()
        family = Family.of(None if tokenizer is None else tokenizer.chat_template, plan.tool_parser)
        self._reader = Reader(model.name, tokenizer, missing, self.defaults.values, pool=self.texts, family=family)

    def served(self) -> ServedModel:
        """Return the model, now that an engine is connected."""
        hello, plan = self.fleet.hello, self._plan
        assert hello is not None, "an engine must be connected first"
        admission = Admission(
            plan.max_waiting,
            plan.max_waiting_tokens or max(WAITING_TOKENS, hello.kv_tokens * plan.replicas),
            plan.max_wait,
            accounts=self._accounts,
            queue=self.name,
            is_busy=self._is_busy,
        )
        return ServedModel(self.name, self.fleet, self._reader, self.metrics, admission)

    def _is_busy(self) -> bool:
        """Whether requests wait for room in the batch of every engine that works."""
        clients = self.fleet.clients.items()
        return all(self._loads.is_busy(name) for name, client in clients if client.trouble is None)


@dataclass(frozen=True, slots=True, eq=False)
class Watcher:
    """Records an engine's statistics; a restarted engine has lost its cache, and the router learns that."""

    router: Router
    loads: SharedLoads
    name: str
    metrics: EngineMetrics

    def engine(self, stats: Stats) -> None:
        """Record the statistics of a step."""
        self.loads.set_busy(self.name, stats.waiting > 0 and stats.blocked_by != "")
        self.metrics.engine(stats)

    def engine_state(self, up: bool) -> None:
        """Record a start or an end of the engine."""
        self.router.forget(self.name)
        self.loads.set_busy(self.name, False)
        self.metrics.engine_state(up)


def shared_accounts(plan: Plan, keyring: Keyring | None, worker: int = 0, descriptor: int | None = None) -> Accounts:
    """Return the accounts of tenants, queues and engines; in shared memory if there are several HTTP processes."""
    if plan.workers == 1:
        return Accounts()
    tenants = sorted({entry.tenant.name for entry in keyring.entries}) if keyring else []
    queues = [name for model in plan.models for name in queue_names(model.name)]
    loads = [name for engine in plan.engines for name in SharedLoads.names(engine.name)]
    return Accounts.shared([*tenants, *queues, *loads], plan.workers, worker, descriptor)


def checkpoint_of(model: ModelPlan, plan: Plan) -> Checkpoint | None:
    """Return the model's files, of which an HTTP process reads all but the weights; None for dummy weights."""
    if plan.settings.get("load_format") == "dummy":
        return None
    return open_checkpoint(resolve(model.model, progress=False))
