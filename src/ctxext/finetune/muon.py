"""Muon for matrices and AdamW for all else, as one optimizer: transformers has no name for the pair."""

import functools
from typing import Any

import torch


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (github.com/KellerJordan/Muon, in torch since 2.9) with AdamW beside it.

    Muon's update is brought to the size of AdamW's (Moonlight, arXiv 2502.16982, section 2.2), so that one learning
    rate and one weight decay serve both. Embeddings, output heads, vectors and scalars are AdamW's.

    Args:
        model: The model; what takes no gradient is left out.
        learning_rate: Of both.
        weight_decay: Of both, but for vectors and scalars.
        betas: AdamW's.
    """

    def __init__(self, model: Any, learning_rate: float, weight_decay: float, betas: tuple[float, float]) -> None:
        head = model.get_output_embeddings()
        tables = {
            id(parameter)
            for module in model.modules()
            if module is head or isinstance(module, torch.nn.Embedding)
            for parameter in module.parameters()
        }
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() == 2 and id(parameter) not in tables]
        own = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in trained if id(parameter) not in own]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = functools.partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon(matrices, lr=learning_rate, weight_decay=weight_decay))
        groups = [
            {"params": [p for p in others if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ]
        if groups := [group for group in groups if group["params"]]:
            self.parts.append(torch.optim.AdamW(groups, lr=learning_rate, betas=betas))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """The groups are those of the parts, so that a schedule that changes their rate changes the parts'."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self._share()
