"""Parts that belong to one algorithm (PPO, DPO, distillation, DAPO), and the metrics of a step."""
