"""What a run will cost before there is one: noise, batch, memory."""
