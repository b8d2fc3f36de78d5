"""`deepspeed.monitor`: training curves of the script's own."""
