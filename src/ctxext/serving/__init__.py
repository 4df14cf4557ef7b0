"""What makes methods that follow the row run in engines that lay sequences end to end."""
