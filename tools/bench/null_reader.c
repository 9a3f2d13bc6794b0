// The least that a client can do: a closed loop of streams that are read, stamped and counted, and never parsed.
//
//   null_reader PORT STREAMS REQUESTS TOKENS         prints one JSON object
//
// What it sees late is the null server's and the kernel's doing, and the floor under every client measured against it.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct { int fd, events; double start, last; char tail[8]; int kept; } Stream;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static char request[1024];
static size_t request_size;
static double *ttfts, *gaps;
static long n_ttft, n_gap, n_events, sent, done, wanted;

static void ask(Stream *s) {
  if (sent >= wanted) return;
  sent++;
  s->events = 0, s->kept = 0, s->start = now();
  if (send(s->fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) { perror("send"); exit(1); }
}

// Events are counted by their beginnings, also where the network cuts one in two.
static int count(char *data, size_t size, int *over) {
  int found = 0;
  char *at = data, *end = data + size;
  while ((at = memmem(at, end - at, "data: ", 6))) found += at[6] == '{', *over |= at[6] == '[', at += 6;
  return found;
}

static void take(Stream *s, double t, char *buffer, ssize_t size) {
  int over = 0, found = count(buffer, size, &over);
  if (over) found--;  // the usage
  if (found > 0) {
    if (s->events == 0) ttfts[n_ttft++] = t - s->start;
    else if (s->events > 1) gaps[n_gap++] = t - s->last;  // the first gap is longer on purpose
    for (int i = 1; i < found; i++) gaps[n_gap++] = 0;
    s->events += found, n_events += found, s->last = t;
  }
  if (over) { done++; ask(s); }
}

static int by_size(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

static double quantile(double *values, long n, double q) { return n ? values[(long)(q * (n - 1))] : 0; }

int main(int argc, char **argv) {
  if (argc != 5) { fprintf(stderr, "null_reader PORT STREAMS REQUESTS TOKENS\n"); return 2; }
  int port = atoi(argv[1]), streams = atoi(argv[2]), tokens = atoi(argv[4]);
  wanted = atol(argv[3]);
  char body[256];
  int n = sprintf(body, "{\"model\":\"null\",\"prompt\":[7,8,9],\"max_tokens\":%d,\"stream\":true,\"return_token_ids\":true}", tokens);
  request_size = sprintf(request, "POST /v1/completions HTTP/1.1\r\nhost: null\r\ncontent-length: %d\r\n\r\n%s", n, body);
  ttfts = malloc(8 * wanted), gaps = malloc(8 * wanted * (tokens + 1));
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  int poll_fd = epoll_create1(0), yes = 1;
  Stream *all = calloc(streams, sizeof(Stream));
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  for (int i = 0; i < streams; i++) {
    all[i].fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(all[i].fd, (void *)&to, sizeof to)) { perror("connect"); return 1; }
    setsockopt(all[i].fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    fcntl(all[i].fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = &all[i]};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, all[i].fd, &e);
  }
  double began = now();
  for (int i = 0; i < streams; i++) ask(&all[i]);
  static char buffer[65536 + 8];
  while (done < wanted) {
    struct epoll_event found[256];
    int ready = epoll_wait(poll_fd, found, 256, 10000);
    if (ready <= 0) { fprintf(stderr, "nothing came for 10 s\n"); return 1; }
    for (int i = 0; i < ready; i++) {
      Stream *s = found[i].data.ptr;
      memcpy(buffer, s->tail, s->kept);  // a beginning that may have been cut
      ssize_t size = recv(s->fd, buffer + s->kept, 65536, 0);
      double t = now();
      if (size < 0 && errno == EAGAIN) continue;
      if (size <= 0) { fprintf(stderr, "the server closed\n"); return 1; }
      size += s->kept;
      ssize_t whole = size > 6 ? size - 6 : 0;
      int edge = size > 6 && memchr(buffer + whole, 'd', 6) != NULL;  // rare: the last bytes may begin an event
      s->kept = 0;
      if (edge) { char *d = memchr(buffer + whole, 'd', 6); s->kept = buffer + size - d; size = d - buffer; }
      int kept = s->kept;
      char tail[8];
      memcpy(tail, buffer + size, kept);
      buffer[size] = 0;
      take(s, t, buffer, size);
      if (kept) { s->kept = kept; memcpy(s->tail, tail, kept); }
    }
  }
  double wall = now() - began;
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  double cpu = u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
  qsort(ttfts, n_ttft, 8, by_size), qsort(gaps, n_gap, 8, by_size);
  printf("{\"events\":%ld,\"requests\":%ld,\"wall_s\":%.6f,\"cpu_s\":%.6f,\"ttft_p50_s\":%.6f,\"ttft_p99_s\":%.6f,"
         "\"itl_p50_s\":%.6f,\"itl_p99_s\":%.6f,\"failures\":0}\n", n_events, done, wall, cpu, quantile(ttfts, n_ttft, 0.5),
         quantile(ttfts, n_ttft, 0.99), quantile(gaps, n_gap, 0.5), quantile(gaps, n_gap, 0.99));
  return 0;
}
