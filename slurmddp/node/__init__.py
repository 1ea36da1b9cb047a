"""What the processes of one node share: a page of progress, messages, memory that outlives a rank."""
