"""What a run writes, and how it is read again: folders, files, tables, pictures, logs."""
