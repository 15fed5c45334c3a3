"""InferenceEngine: one vLLM engine inside a Ray actor, generating only what a full refit has published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.orchestration.child_watch import ChildWatch
from nemo_rl_reshard.orchestration.outcome import DIED, Fault, Outcome
from nemo_rl_reshard.orchestration.serving_gate import ServingGate
from nemo_rl_reshard.orchestration.worker_extension import WORKER_EXTENSION


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation: its tokens, and the log-probability the engine gave each of them."""

    token_ids: list[int]
    logprobs: list[float]


class InferenceEngine:
    """Make an actor of it with `ray.remote(InferenceEngine)`. Carries one rank per worker of the engine.

    Calls run one at a time, so a refit never meets a generation of this actor; requests that reached the engine by
    another way are refused by the idle check. A refit blocks the actor and can still be called off, since that
    travels through the refit's store.
    """

    def __init__(self, name: str, model: str, engine_options: Mapping[str, Any] | None = None) -> None:
        """Start an engine on the checkpoint folder `model`; `engine_options` go to `vllm.LLM`.

        The weights it starts with serve nobody: `load_format="dummy"` will do.
        """
        # vLLM takes ten seconds to import and exists only where engines run.
        from vllm import LLM

        options: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
        options |= dict(engine_options or {})
        self._gate = ServingGate(name)
        self._llm = LLM(model=model, worker_extension_cls=WORKER_EXTENSION, **options)
        self._watch = ChildWatch()
        self._processes = sorted(self._llm.collective_rpc("reshard_process"), key=lambda found: found["rank"])

    def processes(self) -> list[dict[str, int]]:
        """Executor rank and process id of every worker, in rank order."""
        return self._processes

    def version(self) -> int | None:
        """The version served, None while the engine must not generate."""
        return self._gate.version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> tuple[int, list[list[dict[str, Any]]]]:
        """Continue token lists; `sampling` goes to `vllm.SamplingParams`.

        Returns the version and, per prompt and per sample, a `Completion` as a dict. Raises StateError until a full
        refit has succeeded, and while the engine sleeps.
        """
        from vllm import SamplingParams

        version = self._gate.check_may_generate()
        wanted = SamplingParams(logprobs=0, detokenize=False, **sampling)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(requests, wanted, use_tqdm=False)
        return version, [[_completion(sample) for sample in answer.outputs] for answer in answers]

    def sleep(self, level: int) -> None:
        """Put the engine to sleep; from level 2 on its weights are gone until a full refit."""
        self._llm.sleep(level=level)
        self._gate.fall_asleep(weights_lost=level >= 2)

    def wake_up(self) -> None:
        """Wake the engine."""
        self._llm.wake_up()
        self._gate.wake()

    def reshard(self, operation: str, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Perform one operation of the controller: one plain argument and one plain outcome per worker."""
        if operation == "publish":
            self._gate.publish(int(arguments[0]["version"]))
            return [Outcome(argument["rank"]).to_plain() for argument in arguments]
        if operation == "close" and arguments[0]["failure"] is not None:
            self._gate.retract("a refit failed and none has succeeded since")
        if operation == "refit":
            return self._refit(arguments)
        return self._on_workers(operation, arguments)

    def _refit(self, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        self._gate.begin_refit(self._num_unfinished())
        outcomes = self._on_workers("refit", arguments)
        if any("fault" in outcome for outcome in outcomes):
            return outcomes
        self._gate.check_idle(self._num_unfinished())
        # Blocks computed by the old weights would be reused for any prompt that shares a prefix with an old one.
        if not self._llm.reset_prefix_cache():
            raise TargetError("the engine did not reset its prefix cache: old keys and values would be reused")
        return outcomes

    def _on_workers(self, operation: str, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Ask every worker. A worker's death breaks the engine, and becomes the fault of that worker's rank."""
        try:
            return self._llm.collective_rpc(
                "reshard_perform",
                timeout=float(arguments[0]["answer_within_s"]),
                args=(operation, list(arguments)),
            )
        except Exception as error:
            # Workers answer with outcomes and never raise, so this is the executor itself. After a time-out late
            # answers would be taken for those of the next call: either way nobody may use the engine again.
            self._gate.break_down(f"{operation}: {type(error).__name__}: {error}")
            return [outcome.to_plain() for outcome in self._outcomes_of(error, arguments)]

    def _outcomes_of(self, failure: Exception, arguments: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Whose fault it is that the executor failed: that of the worker that died first, else of all."""
        deaths = self._watch.first_deaths(within_s=1.0)
        outcomes = []
        for argument, process in zip(arguments, self._processes, strict=True):
            pid = process["pid"]
            if pid in deaths:
                fault = Fault(DIED, f"engine worker process {pid} ended with exit code {deaths[pid]}")
            elif deaths:
                fault = Fault("RefitAbortedError", "stopped with its engine, which lost a worker")
            else:
                fault = Fault(DIED, f"its engine failed: {type(failure).__name__}: {failure}")
            outcomes.append(Outcome(int(argument["rank"]), None, fault))
        return outcomes

    def _num_unfinished(self) -> int:
        return self._llm.llm_engine.get_num_unfinished_requests()


def _completion(sample: Any) -> dict[str, Any]:
    token_ids = list(sample.token_ids)
    logprobs = [step[token].logprob for step, token in zip(sample.logprobs, token_ids, strict=True)]
    return asdict(Completion(token_ids, logprobs))
