"""The training loop of all models, which differ only in their loss and batches."""

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from bench.factory.batches import BatchSource
from bench.factory.runtime import Runtime
from bench.factory.workspace import write_atomically
from services.training.recipe import Recipe, build_optimizer

ModelT = TypeVar("ModelT", bound=nn.Module)
LossFunction = Callable[[ModelT, Tensor], Tensor]
"""Maps a model and windows [rows, length + 1] to the mean loss per token, in nats."""

_STEPS_BETWEEN_LOGS = 20
_STEPS_BEFORE_ESTIMATE = 100  # the first steps include the compilation


@dataclass(frozen=True)
class Schedule:
    """Intervals of the loop's evaluations and checkpoints; they do not affect the weights."""

    steps_between_evaluations: int = 500
    minutes_between_checkpoints: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """The report of a finished training."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    held_out_loss: float


def next_token_loss(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Returns the mean cross entropy of each token given those before it, in nats."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Trainer(Generic[ModelT]):
    """Trains one model in place. ``directory`` keeps its checkpoint; ``log`` gets a JSON line per event."""

    def __init__(
        self,
        name: str,
        model: ModelT,
        loss_function: LossFunction[ModelT],
        batches: BatchSource,
        held_out: Sequence[Tensor],
        recipe: Recipe,
        schedule: Schedule,
        runtime: Runtime,
        directory: Path,
        log: Path,
    ) -> None:
        self._name = name
        self.model = model.to(runtime.device)
        self._loss = runtime.compile(functools.partial(loss_function, model))
        self._batches = batches
        self._held_out = held_out
        self._recipe = recipe
        self._schedule = schedule
        self._runtime = runtime
        self._checkpoint_path = directory / "checkpoint.pt"
        self._log_path = log
        self._optimizer = build_optimizer(model, recipe, is_fused=runtime.device.type == "cuda")
        self._step = 0
        self._stopwatch = _Stopwatch()

    def resume(self) -> None:
        """Continue from the checkpoint if there is one. Raises ValueError if its recipe differs."""
        if not self._checkpoint_path.exists():
            return
        state = torch.load(self._checkpoint_path, map_location="cpu", weights_only=True)
        if state["recipe"] != asdict(self._recipe):
            raise ValueError(
                f"{self._checkpoint_path} was made with other settings: {state['recipe']}; "
                "continue with those, or start over without --resume"
            )
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]
        self._stopwatch = _Stopwatch(state["tokens"], state["seconds"])

    def train(self, last_step: int | None = None) -> Outcome:
        """Run up to ``last_step`` (default: the recipe's end), then checkpoint and evaluate."""
        last_step = self._recipe.steps if last_step is None else last_step
        self.model.train()
        first_step = self._step
        last_checkpoint = time.monotonic()
        progress = self._progress_bar()
        self._stopwatch.restart()
        while self._step < last_step:
            loss = self._train_step()
            progress.update(self._recipe.tokens_per_step)
            must_evaluate = self._step % self._schedule.steps_between_evaluations == 0
            if self._step % _STEPS_BETWEEN_LOGS and not must_evaluate and self._step < last_step:
                continue
            # Reading the loss waits for the device, so the time is only known after it.
            self._report(loss.item(), progress, self._step - first_step == _STEPS_BEFORE_ESTIMATE)
            if must_evaluate and self._step < last_step:
                self._log(event="evaluation", held_out_loss=self.evaluate())
            minutes = (time.monotonic() - last_checkpoint) / 60
            if minutes >= self._schedule.minutes_between_checkpoints:
                self._save_checkpoint()
                last_checkpoint = time.monotonic()
            self._stopwatch.restart()
        progress.close()
        self._save_checkpoint()
        held_out_loss = self.evaluate()
        self._log(event="evaluation", held_out_loss=held_out_loss)
        watch = self._stopwatch
        return Outcome(self._step, watch.tokens, watch.seconds, watch.mean_rate, held_out_loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the held-out batches."""
        self.model.train(False)
        with self._runtime.mixed_precision():
            losses = [self._loss(windows).float() for windows in self._held_out]
        self.model.train()
        return torch.stack(losses).mean().item()

    def _train_step(self) -> Tensor:
        windows = self._batches.batch(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate_at(self._step)
        with self._runtime.mixed_precision():
            loss = self._loss(windows)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.max_gradient_norm)
        self._optimizer.step()
        self._step += 1
        self._stopwatch.add(windows.shape[0] * (windows.shape[1] - 1))
        return loss.detach()

    def _report(self, loss: float, progress: "tqdm[Any]", is_estimate_due: bool) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of {self._name} at step {self._step} is {loss}")
        rate = self._stopwatch.lap()
        seconds_left = (self._recipe.steps - self._step) * self._recipe.tokens_per_step / rate
        progress.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
        if is_estimate_due:
            estimate = f"{rate:,.0f} tokens/s, about {seconds_left / 60:.1f} minutes to go"
            progress.write(f"{self._name}: {estimate}", file=sys.stderr)
        self._log(
            event="step",
            loss=loss,
            learning_rate=self._recipe.learning_rate_at(self._step - 1),
            tokens_per_second=round(rate),
            seconds_left=round(seconds_left),
        )

    def _progress_bar(self) -> "tqdm[Any]":
        return tqdm(
            total=self._recipe.steps * self._recipe.tokens_per_step,
            initial=self._step * self._recipe.tokens_per_step,
            desc=self._name,
            unit=" tokens",
            unit_scale=True,
            mininterval=1 if sys.stderr.isatty() else 20,
        )

    def _log(self, **entry: object) -> None:
        line = json.dumps({"model": self._name, "step": self._step, "time": time.time(), **entry})
        with self._log_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _save_checkpoint(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "tokens": self._stopwatch.tokens,
            "seconds": self._stopwatch.seconds,
            "recipe": asdict(self._recipe),
        }
        write_atomically(self._checkpoint_path, lambda temporary: torch.save(state, temporary))


class _Stopwatch:
    """Counts tokens and the seconds spent on them, except between `lap` and `restart`."""

    def __init__(self, tokens: int = 0, seconds: float = 0.0) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self._lap_tokens = 0
        self._started = time.monotonic()

    @property
    def mean_rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def restart(self) -> None:
        self._started = time.monotonic()
        self._lap_tokens = 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self._lap_tokens += tokens

    def lap(self) -> float:
        """Return the tokens per second since the last restart."""
        seconds = time.monotonic() - self._started
        self.seconds += seconds
        return self._lap_tokens / seconds
