// A device of a federation in another language, written from PROTOCOL.md. It trains softmax regression with its own code.
//
//	second-client golden FOLDER                          checks the golden vectors
//	second-client join -federation F -cid C -broker ...  takes part until it is stopped
package main

import (
	"encoding/csv"
	"flag"
	"math/rand"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	rand.Seed(time.Now().UnixNano())
	if len(os.Args) == 3 && os.Args[1] == "golden" {
		checkGolden(os.Args[2])
		return
	}
	flags := flag.NewFlagSet("join", flag.ExitOnError)
	c := &client{engine: "onnx"}
	flags.StringVar(&c.federation, "federation", "", "")
	flags.StringVar(&c.cid, "cid", "", "")
	flags.StringVar(&c.broker, "broker", "tcp://127.0.0.1:1883", "")
	flags.StringVar(&c.folder, "state", "", "folder of the files that survive a restart")
	flags.StringVar(&c.quitAt, "quit-at", "", "for tests: end when this stage of a sum, or job, is asked for")
	who := identity{}
	flags.StringVar(&who.folder, "identity", "", "folder with ca.crt, and device.crt and device.key or a token")
	flags.StringVar(&who.enrolURL, "enrol-url", "", "where a token becomes a certificate")
	keys := flags.String("signing-keys", "", "public keys in hex, with commas")
	train := flags.String("train", "", "CSV file: a sample a line, its label last")
	test := flags.String("test", "", "the same, held-out")
	flags.Parse(os.Args[2:])
	c.ring = newKeyring(strings.Split(*keys, ","))
	c.train, c.test = readSamples(*train), readSamples(*test)
	if err := os.MkdirAll(c.folder, 0o700); err != nil {
		panic(err)
	}
	c.load()
	if _, trusted := c.ring[c.disk.EpochKey]; !trusted {
		c.disk.Epoch = 0 // of a federation that began anew since
	}
	if who.folder != "" {
		who.federation, who.cid = c.federation, c.cid
		who.enrol()
		c.tls = who.config()
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	c.run(stop)
}

func readSamples(path string) (s samples) {
	if path == "" {
		return
	}
	file, err := os.Open(path)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	if err != nil {
		panic(err)
	}
	for _, line := range lines {
		x := make([]float64, len(line)-1)
		for i := range x {
			v, err := strconv.ParseFloat(line[i], 32)
			if err != nil {
				panic(err)
			}
			x[i] = v
		}
		label, err := strconv.Atoi(line[len(line)-1])
		if err != nil {
			panic(err)
		}
		s.x, s.labels = append(s.x, x), append(s.labels, label)
	}
	return
}
