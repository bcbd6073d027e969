"""What a process needs of its machine: processor, memory, files, time, and the model files on its disk."""
