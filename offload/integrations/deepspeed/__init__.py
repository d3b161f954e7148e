"""What DeepSpeed scripts call: `import offload as deepspeed` is all that changes in them."""
