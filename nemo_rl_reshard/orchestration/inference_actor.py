"""InferenceEngine: one vLLM engine inside a Ray actor, generating only what a full refit has published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl_reshard.errors import HandshakeError
from nemo_rl_reshard.orchestration.child_watch import ChildWatch
from nemo_rl_reshard.orchestration.outcome import DIED, Fault, Outcome
from nemo_rl_reshard.orchestration.served_ranks import PlainOutcome, ServedRanks
from nemo_rl_reshard.orchestration.worker_extension import WORKER_EXTENSION
from nemo_rl_reshard.targets.vllm_front import publish_version, reset_caches


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation: its tokens, and the log-probability the engine gave each of them."""

    token_ids: list[int]
    logprobs: list[float]


class InferenceEngine(ServedRanks):
    """Make an actor of it with `ray.remote(InferenceEngine)`. Carries one rank per worker of the engine."""

    def __init__(self, name: str, model: str, engine_options: Mapping[str, Any] | None = None) -> None:
        """Start an engine on the checkpoint folder `model`; `engine_options` go to `vllm.LLM`.

        The weights it starts with serve nobody: `load_format="dummy"` will do.
        """
        # vLLM takes ten seconds to import and exists only where engines run.
        from vllm import LLM

        options: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
        options |= dict(engine_options or {})
        super().__init__(name)
        self._llm = LLM(model=model, worker_extension_cls=WORKER_EXTENSION, **options)
        self._watch = ChildWatch()
        self._processes = sorted(self._llm.collective_rpc("reshard_process"), key=lambda found: found["rank"])

    def processes(self) -> list[dict[str, int]]:
        """Executor rank and process id of every worker, in rank order."""
        return self._processes

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> tuple[int, list[list[dict[str, Any]]]]:
        """Continue token lists; `sampling` goes to `vllm.SamplingParams`.

        Returns the version and, per prompt and per sample, a `Completion` as a dict. Raises StateError until a full
        refit has succeeded, and while the engine sleeps.
        """
        from vllm import SamplingParams

        version = self.gate.check_may_generate()
        wanted = SamplingParams(logprobs=0, detokenize=False, **sampling)
        requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(requests, wanted, use_tqdm=False)
        return version, [[_completion(sample) for sample in answer.outputs] for answer in answers]

    def sleep(self, level: int) -> None:
        """Put the engine to sleep; from level 2 on its weights are gone until a full refit."""
        # First, so that a sleep that fails half-way leaves no engine that serves what it has thrown away.
        self.gate.fall_asleep(weights_lost=level >= 2)
        self._llm.sleep(level=level)

    def wake_up(self) -> None:
        """Wake the engine."""
        self._llm.wake_up()
        self.gate.wake()

    def num_unfinished(self) -> int:
        """See `ServedRanks`."""
        return int(self._llm.llm_engine.get_num_unfinished_requests())

    def publish(self, version: int) -> None:
        """See `ServedRanks`."""
        super().publish(version)
        publish_version(self._llm, version)

    def reset_caches(self) -> bool:
        """See `ServedRanks`."""
        reset_caches(self._llm)
        return True

    def on_ranks(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None
    ) -> list[PlainOutcome]:
        """Ask every worker. A worker's death breaks the engine, and becomes the fault of that worker's rank.

        Raises HandshakeError, before any worker is asked, if there is not one argument for each of them.
        """
        if len(arguments) != len(self._processes):
            raise HandshakeError(
                f"{operation}: the engine has {len(self._processes)} workers and is seated as {len(arguments)} ranks; "
                "give its member num_ranks = tensor-parallel size x pipeline stages"
            )
        try:
            return self._llm.collective_rpc(
                "reshard_perform",
                timeout=float(arguments[0]["answer_within_s"]),
                args=(operation, list(arguments), shared),
            )
        except Exception as error:
            # Workers answer with outcomes and never raise, so this is the executor itself. After a time-out late
            # answers would be taken for those of the next call: either way nobody may use the engine again.
            self.gate.break_down(f"{operation}: {type(error).__name__}: {error}")
            return [outcome.to_plain() for outcome in self._outcomes_of(error, operation, arguments)]

    def _outcomes_of(self, failure: Exception, operation: str, arguments: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Whose fault it is that the executor failed: that of the worker that died first, else of all."""
        deaths = self._watch.first_deaths(within_s=1.0)
        outcomes = []
        for argument, process in zip(arguments, self._processes, strict=True):
            pid = process["pid"]
            if pid in deaths:
                code = "unknown" if deaths[pid] is None else deaths[pid]
                fault = Fault(DIED, f"engine worker process {pid} ended with exit code {code}")
            elif deaths:
                fault = Fault("RefitAbortedError", "stopped with its engine, which lost a worker")
            else:
                fault = Fault(DIED, f"its engine failed: {type(failure).__name__}: {failure}")
            outcomes.append(Outcome(int(argument["rank"]), None, fault, written=operation == "refit"))
        return outcomes


def _completion(sample: Any) -> dict[str, Any]:
    token_ids = list(sample.token_ids)
    logprobs = [step[token].logprob for step, token in zip(sample.logprobs, token_ids, strict=True)]
    return asdict(Completion(token_ids, logprobs))
