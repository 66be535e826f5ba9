"""Networks as real libraries write them (torchvision, timm, transformers), small and by hand."""
