"""What fits and what works on a machine: the parts of task=plan and task=doctor."""
