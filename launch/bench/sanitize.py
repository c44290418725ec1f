"""Small steps of every policy, for compute-sanitizer; one line each.

    compute-sanitizer --tool memcheck python launch/bench/sanitize.py        about a minute each
    compute-sanitizer --tool racecheck python launch/bench/sanitize.py

Partly empty tiles everywhere, a third of the tokens ignored, a bias, label smoothing and z-loss; at eps = 1e-30 every
column is marked, so that the sampled backward's fallback runs too.
"""

import torch

import vpcce
from vpcce import policy as policies

POLICIES = (vpcce.exact(), vpcce.filtered(), vpcce.sampled(2**-6), vpcce.sampled(2**-6, deterministic=True),
            vpcce.sampled(1e-30))  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    policies.DENSE = float("inf")  # no policy is replaced by the exact one
    for n, v, d in ((300, 1000, 72), (260, 2100, 64)):
        for policy in POLICIES:
            hidden = torch.randn(n, d, device="cuda").bfloat16().requires_grad_()
            weight = (3 * torch.randn(v, d, device="cuda") / d**0.5).bfloat16().requires_grad_()
            bias = torch.zeros(v, device="cuda", requires_grad=True)
            target = torch.randint(0, v, (n,), device="cuda")
            target[::3] = -100
            loss = vpcce.linear_cross_entropy(
                hidden, weight, target, bias=bias, label_smoothing=0.1, z_loss=1e-3, backward=policy
            )
            loss.backward()
            print(n, v, d, policy.text, loss.item(), weight.grad.float().norm().item(), flush=True)


if __name__ == "__main__":
    main()
