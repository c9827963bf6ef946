"""Windows of convolutions and poolings: how they lie on an image, on a part of one, and their gradients."""
