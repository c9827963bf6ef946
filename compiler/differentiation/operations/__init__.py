"""What a file's nodes lost of the PyTorch operations that they came from."""
