"""Published losses and advantages, distillation and self-play for ownloop."""
