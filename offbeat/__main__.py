from offbeat.cli import main

main()
