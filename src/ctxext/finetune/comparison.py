"""What the logits of a piece of a sequence are compared with: the tokens that came, or what another view says."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Head = Callable[[torch.Tensor], torch.Tensor]
"""Makes logits of hidden states."""


class Comparison(Protocol):
    """What the logits of some positions are held against."""

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The summed loss of logits of shape (positions, vocabulary), in float32."""
        ...

    def loss_and_slope(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with its gradient, of the logits' shape, in as little memory as it takes."""
        ...


class NextToken:
    """Cross-entropy with the tokens that came, (positions,)."""

    def __init__(self, targets: torch.Tensor) -> None:
        self.targets = targets

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The summed loss."""
        return torch.nn.functional.cross_entropy(logits, self.targets, reduction="sum")

    def loss_and_slope(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax minus one at the target."""
        scores, columns = logits.log_softmax(-1), self.targets[:, None]
        loss = -scores.gather(1, columns).sum()
        slope = scores.exp_()
        return loss, slope.scatter_add_(1, columns, slope.new_full((1, 1), -1.0).expand_as(columns))


class Divergence:
    """Kullback-Leibler divergence from what another model says, given by its hidden states, (1, positions, width)."""

    def __init__(self, hidden: torch.Tensor, head: Head) -> None:
        self.hidden, self.head = hidden, head

    def _said(self) -> torch.Tensor:
        with torch.no_grad():
            return self.head(self.hidden).float().flatten(0, 1).log_softmax(-1)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The summed divergence."""
        said = self._said()
        return torch.nn.functional.kl_div(logits.log_softmax(-1), said, reduction="sum", log_target=True)

    def loss_and_slope(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax minus the other's softmax."""
        said, scores = self._said(), logits.log_softmax(-1)
        shares = said.exp()
        return (shares * (said - scores)).sum(), scores.exp_().sub_(shares)


class Source(Protocol):
    """A model to stay close to."""

    weight: float

    def knows(self, positions: torch.Tensor) -> bool:
        """Whether it has something to say of sequences with such positions."""
        ...

    def read(self, ids: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, Head]:
        """Its last hidden states, (1, tokens, width), and what makes logits of some of them."""
        ...
