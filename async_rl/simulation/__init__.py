"""The program in virtual time: the real orchestration on simulated engines, trainer, network and disk."""
