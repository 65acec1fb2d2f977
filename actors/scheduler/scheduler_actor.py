"""The scheduler actor: its core with every extension, and the observers around it."""

from __future__ import annotations

import logging
from time import monotonic

from actorium.actors.cluster.replica_link import NumberedRequests, ReplicaLink
from actorium.actors.config.cluster_settings import replica_of
from actorium.actors.config.speculative import parse_speculative
from actorium.actors.core import Context, Core
from actorium.actors.ledger.committer import open_ledger
from actorium.actors.models.media_models import takes_media
from actorium.actors.recorder.recorder import Recorder
from actorium.actors.runtime.inflight_journal import InflightJournal, open_journal
from actorium.actors.scheduler.cache.host_tier import HostTier
from actorium.actors.scheduler.cache.page_tier import PageTier
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.draft_policy import MeasuredDraftPolicy
from actorium.actors.scheduler.extensions import SchedulerExtensions
from actorium.actors.scheduler.media_holds import MediaHolds
from actorium.actors.scheduler.media_use import MediaUse
from actorium.actors.scheduler.prefill_pacing import new_pacer
from actorium.actors.scheduler.queue_policies import new_queue
from actorium.actors.scheduler.recovery.audit import PeriodicAuditor
from actorium.actors.scheduler.recovery.recovery_log import PriorRun, RecoveryLog, restore_requests
from actorium.actors.scheduler.recovery.request_faults import RequestFaults
from actorium.actors.scheduler.recovery.suspects import SuspectTrials
from actorium.actors.scheduler.request_metrics import RequestMetrics
from actorium.actors.structured.grammar_compiler import GrammarCompiler
from actorium.actors.structured.structured_output import (
    Load,
    StructuredOutputManager,
    no_vocabulary,
    vocabulary,
)

LOG = logging.getLogger("actorium.recorder")


def build(context: Context) -> SchedulerCore:
    """The core of the role "scheduler". With a ledger it goes on from there. Raises `BadConfig`
    and `EngineUnavailable` where that cannot be."""
    ledger, load = open_ledger(context), vocabulary(context)
    journal = open_journal(context.run_dir, context.role, context.config.recovery.request_budget)
    if ledger is None:
        return extended_core(context, None, load, journal)
    prior = PriorRun(ledger.history, ledger.same_boot, monotonic())
    core = extended_core(context, prior, load, journal)
    core.ledger = ledger
    return core


def extended_core(context: Context, prior: PriorRun | None = None, load: Load = no_vocabulary,
                  journal: InflightJournal | None = None) -> SchedulerCore:
    """A core with every extension, without IO; prior: the earlier life that it goes on from."""
    config = context.config
    core = SchedulerCore(context, extensions_of(context, load, journal))
    if prior is not None:
        core.restore(restore_requests(prior, config.scheduler.request_timeout),
                     prior.history.next_sid, prior.now)
    return core


def extensions_of(context: Context, load: Load = no_vocabulary,
                  journal: InflightJournal | None = None) -> SchedulerExtensions:
    """Every extension, as configured."""
    config = context.config
    fixed = parse_speculative(config.speculation.speculative).fixed
    guard = RequestFaults(journal)
    return SchedulerExtensions(
        guard=guard, history=RecoveryLog(config.recovery, guard.journal),
        queue=new_queue(config.scheduler.schedule_policy, config.scheduler.tenant_weights),
        metrics=RequestMetrics(config.scheduler.max_num_seqs + 1),
        masks=StructuredOutputManager(load), trials=SuspectTrials(),
        auditor=PeriodicAuditor(config.memory),
        media=media_use(context),
        new_draft_policy=lambda drafts: MeasuredDraftPolicy(drafts, fixed),
        new_prefill_pacer=lambda worker: new_pacer(config.scheduler.target_itl, worker),
        new_page_tier=lambda pages, worker: HostTier(
            pages, worker, context.epoch, config.device.tensor_parallel_size)
        if worker.host_pages else PageTier())


def media_use(context: Context) -> MediaUse:
    """Who tells the media actor what requests name: not a replica, whose router does."""
    own = takes_media(context.config) and replica_of(context.config.cluster) is None
    return MediaHolds(context.epoch) if own else MediaUse()


def observed(core: Core, context: Context) -> Core:
    """The core with its observers: the flight recorder, and the compilation of grammars on a
    thread. Any core but a `SchedulerCore` is returned as it is."""
    if not isinstance(core, SchedulerCore):
        return core
    masks, around = core.masks, recorded(core, context)
    replica = replica_of(context.config.cluster)
    if replica is not None:
        around = numbered = NumberedRequests(around, core)
    if isinstance(masks, StructuredOutputManager):
        around = GrammarCompiler(around, masks, context.config.scheduler.max_num_queued_reqs)
    return around if replica is None else ReplicaLink(around, numbered, core, replica, context)


def recorded(core: SchedulerCore, context: Context) -> Core:
    """The core with a flight recorder around it, where one is configured."""
    if not context.config.runtime.recorder_bytes:
        return core
    try:
        return Recorder(core, context, core.masks)
    except OSError as error:
        LOG.warning("no flight recorder: %s", error)
        return core
