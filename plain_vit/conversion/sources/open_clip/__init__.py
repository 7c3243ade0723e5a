"""OpenCLIP and OpenAI's CLIP: architectures, live image towers, checkpoints, and export."""
