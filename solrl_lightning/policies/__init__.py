"""Text-to-image architectures, one per file, and their shared parts: adapters, replicas, loading, storage."""
