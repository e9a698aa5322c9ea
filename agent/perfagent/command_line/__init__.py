"""What all subcommands share: the parser and its errors, types of options, completion, and tables on a terminal."""
