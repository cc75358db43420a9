"""The default method, which decides by the loss on training samples that devices hold out for a while."""
