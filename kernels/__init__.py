"""One rank's share of the work in Triton. These modules import torch, triton and each other, and know no other rank."""
