"""What a process knows of its machine: threads, memory, versions."""
