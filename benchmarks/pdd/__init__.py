"""What the simulator makes of the published figures: fits, predictions, and where they break."""
